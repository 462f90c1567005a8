"""A checkpoint's tensors put into a model, one parameter at a time.

No more than the model and one parameter are in memory at once: files are mapped, and
each parameter is built on the host in its final dtype and moved to the device.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.errors import ModelError, faults
from lora_jax.models.checkpoint import DTYPES, StoredTensor
from lora_jax.models.config import DEQUANTISE
from lora_jax.models.names import (
    COMPUTED_SUFFIXES,
    Naming,
    Path,
    Table,
    Target,
    checkpoint_table,
)

HEAD = "lm_head.weight"
"""The tensor that a checkpoint may leave out if its config says that it is tied."""

MAX_LISTED = 20
"""Faults of one kind that an error lists before it only counts."""

MXFP4_SUFFIXES = ("_proj_blocks", "_proj_scales")
"""Ends of the two tensors that gpt-oss' own checkpoints have for one kernel."""

QUANTISED = f"mxfp4 weights are not supported; {DEQUANTISE}"

Tensors = Mapping[str, StoredTensor]


M = TypeVar("M", bound=nnx.Module)


def fill(
    build: Callable[[nnx.Rngs], M],
    naming: Naming,
    tensors: Tensors,
    *,
    origin: str,
    progress: Callable[[str], None],
) -> M:
    """Returns the model that `build` makes, with a checkpoint's weights.

    Args:
      build: makes the model; only its shapes and dtypes are used.
      naming: how the checkpoint may spell its tensors.
      tensors: the checkpoint; floats are rounded to the parameters' dtype.
      origin: where it came from, for the error text.
      progress: is called with a line of text now and then.

    Raises:
      ModelError: if any tensor is missing, unknown, or has another shape or dtype; the
        text names all of them.
    """
    model = nnx.eval_shape(lambda: build(nnx.Rngs(params=0)))
    spellings = {s for name in tensors for s in naming.spellings(name)}
    table = checkpoint_table(model, spellings)
    sources, wrong = match_tensors(tensors, table, naming)
    if wrong:
        raise ModelError(faults(f"weights in {origin} do not fit its config:", wrong))
    graphdef, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    progress(f"loading {len(table)} tensors as {flat[0][1].get_value().dtype}")
    by_path = _by_path(table)
    filled = [
        (path, variable.replace(_build(variable, by_path[path], sources)))
        for path, variable in flat
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def match_tensors(
    tensors: Tensors, table: Table, naming: Naming
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Returns the tensor for each name of the table, and a line for each misfit."""
    found: dict[str, StoredTensor] = {}
    unknown, misfits = [], []
    for name, stored in sorted(tensors.items()):
        place = next((p for p in naming.spellings(name) if p in table), None)
        if place is not None:
            misfits += _misfit(name, stored, table[place].shape)
            if place in found:
                misfits.append(f"{name}: is in the file twice, also as {place}")
            found[place] = stored
        elif name in naming.tied:
            misfits += _tied_misfit(name, naming.tied[name], tensors)
        elif not name.endswith(COMPUTED_SUFFIXES) and not name.startswith(
            naming.unused
        ):
            unknown.append(f"{name}: {_stranger(name)}")
    missing = [f"{name}: missing" for name in sorted(table.keys() - found.keys())]
    if HEAD in table and HEAD not in found:
        missing.append(
            "the head is missing: if it is the embedding table, config.json must say "
            '"tie_word_embeddings": true'
        )
    kinds = (missing, unknown, misfits)
    return found, [line for kind in kinds for line in _capped(kind)]


def _stranger(name: str) -> str:
    return QUANTISED if name.endswith(MXFP4_SUFFIXES) else "not a tensor of this model"


def _capped(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_LISTED
    return lines if more <= 0 else [*lines[:MAX_LISTED], f"... and {more} more like it"]


def _misfit(name: str, stored: StoredTensor, expected: tuple[int, ...]) -> list[str]:
    if stored.dtype not in DTYPES:
        return [f"{name}: dtype {stored.dtype}, supported: {', '.join(DTYPES)}"]
    if stored.shape != expected:
        return [f"{name}: shape {list(stored.shape)}, expected {list(expected)}"]
    return []


def _tied_misfit(name: str, twin: str, tensors: Tensors) -> list[str]:
    """A tied tensor may be in the file, but then it must equal its twin."""
    if twin not in tensors:
        return []
    misfit = _misfit(name, tensors[name], tensors[twin].shape)
    if misfit or np.array_equal(tensors[name].read(), tensors[twin].read()):
        return misfit
    return [
        f"{name}: differs from {twin} although config.json ties them; set "
        '"tie_word_embeddings": false or remove the tensor'
    ]


def _by_path(table: Table) -> dict[Path, list[tuple[str, Target]]]:
    sources: dict[Path, list[tuple[str, Target]]] = {}
    for name, target in table.items():
        sources.setdefault(target.path, []).append((name, target))
    return sources


def _build(
    variable: nnx.Variable, sources: list[tuple[str, Target]], tensors: Tensors
) -> jax.Array:
    """Returns one parameter, its parts side by side along the last axis."""
    abstract = variable.get_value()
    host = np.empty(abstract.shape, abstract.dtype)
    for name, target in sources:
        part = tensors[name].read()
        if target.transposed:
            part = np.swapaxes(part, -1, -2)
        if target.interleaved:
            part = np.concatenate([part[..., ::2], part[..., 1::2]], axis=-1)
        into = host if target.expert is None else host[target.expert]
        into[..., target.start : target.start + part.shape[-1]] = part
    return jnp.asarray(host)
