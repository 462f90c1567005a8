"""A checkpoint's tensors put into a model, one parameter at a time.

No more than the model and one parameter are in memory at once: files are mapped, and
each parameter is built on the host in its final dtype and moved to the device.
"""

import pathlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lora_jax.errors import ModelError, faults
from lora_jax.models.causal_lm import CausalLM
from lora_jax.models.checkpoint import DTYPES, StoredTensor, list_tensors
from lora_jax.models.config import ModelConfig
from lora_jax.models.names import (
    COMPUTED_SUFFIXES,
    Path,
    Table,
    Target,
    checkpoint_table,
)

TIED_HEAD = "lm_head.weight"
"""In the file of a tied model this tensor may repeat the embedding table."""

MAX_LISTED = 20
"""Faults of one kind that an error lists before it only counts."""

Tensors = Mapping[str, StoredTensor]


def model_from_folder(
    folder: pathlib.Path,
    config: ModelConfig,
    *,
    dtype: DTypeLike,
    progress: Callable[[str], None],
) -> CausalLM:
    """Returns the model with the folder's weights.

    Args:
      folder: a Hugging Face folder with safetensors weights.
      config: what its config.json says.
      dtype: of the parameters; the file's floats are rounded to it.
      progress: is called with a line of text now and then.

    Raises:
      ModelError: if any tensor is missing, unknown, or has another shape or dtype; the
        text names all of them.
    """
    model = nnx.eval_shape(
        lambda: CausalLM(config, dtype=dtype, rngs=nnx.Rngs(params=0))
    )
    table = checkpoint_table(model)
    tensors = _with_prefix(list_tensors(folder), model)
    wrong = check_tensors(tensors, table, model)
    if wrong:
        raise ModelError(faults(f"weights in {folder} do not fit its config:", wrong))
    progress(f"loading {len(table)} tensors as {jnp.dtype(dtype).name}")
    graphdef, state = nnx.split(model)
    sources = _by_path(table)
    filled = [
        (path, variable.replace(_build(variable, sources[path], tensors)))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _with_prefix(tensors: Tensors, model: CausalLM) -> Tensors:
    """Returns the tensors with the names that a whole model gives them.

    A checkpoint that was saved from the body alone leaves out the body's own name; the
    hub's `gpt2` is one.
    """
    body, embedding = model.body_name, _embedding(model)
    if embedding in tensors or embedding.removeprefix(f"{body}.") not in tensors:
        return tensors
    whole = (f"{body}.", "lm_head.")
    return {
        name if name.startswith(whole) else f"{body}.{name}": tensor
        for name, tensor in tensors.items()
    }


def _embedding(model: CausalLM) -> str:
    return f"{model.body_name}.{model.body.embedding_name}.weight"


def check_tensors(tensors: Tensors, table: Table, model: CausalLM) -> list[str]:
    """Returns a line for everything in the file that does not fit the table."""
    missing = [f"{name}: missing" for name in sorted(table.keys() - tensors.keys())]
    if TIED_HEAD in table and TIED_HEAD not in tensors:
        missing.append(
            "the head is missing: if it is the embedding table, config.json must say "
            '"tie_word_embeddings": true'
        )
    unknown, misfits = [], []
    for name, stored in sorted(tensors.items()):
        if name in table:
            misfits += _misfit(name, stored, table[name].shape)
        elif name == TIED_HEAD:
            misfits += _tied_misfit(tensors, _embedding(model))
        elif not name.endswith(COMPUTED_SUFFIXES):
            unknown.append(f"{name}: not a tensor of {model.config.model_type}")
    return [line for kind in (missing, unknown, misfits) for line in _capped(kind)]


def _capped(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_LISTED
    return lines if more <= 0 else [*lines[:MAX_LISTED], f"... and {more} more like it"]


def _misfit(name: str, stored: StoredTensor, expected: tuple[int, ...]) -> list[str]:
    if stored.dtype not in DTYPES:
        return [f"{name}: dtype {stored.dtype}, supported: {', '.join(DTYPES)}"]
    if stored.shape != expected:
        return [f"{name}: shape {list(stored.shape)}, expected {list(expected)}"]
    return []


def _tied_misfit(tensors: Tensors, embedding: str) -> list[str]:
    """A tied head may be in the file, but then it must be the embedding table."""
    head, table = tensors[TIED_HEAD], tensors.get(embedding)
    if table is None:
        return []
    misfit = _misfit(TIED_HEAD, head, table.shape)
    if misfit or np.array_equal(head.read(), table.read()):
        return misfit
    return [
        f"{TIED_HEAD}: differs from {embedding} although config.json ties them; set "
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
        part = part.T if target.transposed else part
        host[..., target.start : target.start + part.shape[-1]] = part
    return jnp.asarray(host)
