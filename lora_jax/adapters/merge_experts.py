"""Updates of experts -> what they add to each tensor of a model -> the merged tensors.

Whatever an adapter's layout and the folder's: an update is cut into the factors of each
expert and each of its projections, and these are added where the folder keeps them.
Sums are made in float32, one expert at a time, and rounded once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lora_jax.adapters.expert_layout import (
    ExpertShape,
    expert_factors,
    expert_paths,
    layout_faults,
)
from lora_jax.adapters.expert_tensors import Place, Rows
from lora_jax.adapters.names import match_modules
from lora_jax.adapters.parts import AdapterPart, ExpertPairs, ExpertsLowRank, LowRank

KINDS = (LowRank, ExpertsLowRank, ExpertPairs)
"""Kinds that can be added to experts."""


@dataclass(frozen=True, eq=False)
class Update:
    """What is added to some rows of one tensor: `factor * b @ a`."""

    rows: Rows
    a: np.ndarray
    b: np.ndarray
    factor: float


@dataclass(frozen=True)
class Found:
    """What an adapter does to the experts of a folder.

    Attributes:
      updates: in the order of its modules.
      modules: its modules that are experts.
      faults: why some of them cannot be merged.
    """

    updates: tuple[Update, ...]
    modules: frozenset[str]
    faults: tuple[str, ...]


def find_experts(
    parts: Mapping[str, AdapterPart], weight: float, places: Mapping[str, Place]
) -> Found:
    """Finds the parts of an adapter that are updates of a folder's experts.

    Other kinds, for a projection of one expert that the folder keeps as a layer of its
    own, are left to the merging of layers.

    Args:
      parts: by module, as in `Adapter`.
      weight: factor of the adapter.
      places: of `expert_places`.
    """
    paths = {module: expert_paths(module, part) for module, part in parts.items()}
    names, _ = match_modules({p for some in paths.values() for p in some}, places)
    updates: list[Update] = []
    faults, modules, taken = [], [], set()
    for module, candidates in paths.items():
        here = [places[names[path]] for path in candidates if path in names]
        if not here:
            continue
        part = parts[module]
        if not isinstance(part, KINDS) and _is_layer(here[0]):
            continue
        modules.append(module)
        problems, place = _fitting(part, here)
        faults += [f"{module}: {text}" for text in problems]
        if place is None or problems:
            continue
        assert isinstance(part, KINDS), "_fitting() refuses other kinds"
        added = _updates(part, place, weight)
        keys = {(u.rows.tensor, u.rows.expert, u.rows.rows.start) for u in added}
        if not taken.isdisjoint(keys):
            faults.append(f"{module}: another module of the file has this place too")
        taken |= keys
        updates += added
    return Found(tuple(updates), frozenset(modules), tuple(faults))


def _is_layer(place: Place) -> bool:
    """Whether the folder keeps what is named, and no more, in one tensor."""
    return [[rows.expert for rows in parts] for parts in place.rows] == [[None]]


def _fitting(
    part: AdapterPart, here: Sequence[Place]
) -> tuple[list[str], Place | None]:
    """Returns the place that the part fits, or why there is none."""
    if not isinstance(part, KINDS):
        return [f"a part of kind {part.kind!r} cannot be merged into experts"], None
    found = {place: _faults(part, place.shape) for place in here}
    if len(here) == 1:
        return found[here[0]], here[0]
    fits = [place for place, problems in found.items() if not problems]
    if len(fits) == 1:
        return [], fits[0]
    several = "several parameters" if fits else "no parameter"
    text = (
        f"target_parameters does not name it, and its shapes fit {several}; add "
        "target_parameters to adapter_config.json"
    )
    return [text], None


def _faults(
    part: LowRank | ExpertsLowRank | ExpertPairs, shape: ExpertShape
) -> list[str]:
    if not isinstance(part, LowRank):
        return [text.rstrip(".") for text in layout_faults(part, shape)]
    own = (part.b.shape[0], part.a.shape[1])
    if shape.experts != 1:
        return ["a pair for one expert, at the place of all; name the expert"]
    if own != (shape.d_out, shape.d_in):
        expected = (shape.d_out, shape.d_in)
        return [f"update of shape {own}, an expert has {expected}"]
    return []


def _updates(
    part: LowRank | ExpertsLowRank | ExpertPairs, place: Place, weight: float
) -> list[Update]:
    if isinstance(part, LowRank):
        a, b = part.a[None], part.b[None]
    else:
        a, b = expert_factors(part, place.shape)
    number = len(place.rows[0])
    width = b.shape[1] // number
    updates = []
    for own_a, own_b, parts in zip(a, b, place.rows, strict=True):
        for index, rows in enumerate(parts):
            mine = slice(index, None, number)
            if not place.interleaved:
                mine = slice(index * width, (index + 1) * width)
            updates.append(Update(rows, own_a, own_b[mine], weight * part.scale))
    return updates


@dataclass(frozen=True, eq=False)
class MergedTensor:
    """A tensor with its updates, rounded, and the lengths of what happened."""

    values: np.ndarray
    before: float
    change: float
    error: float


def merge_tensor(
    stored: np.ndarray, updates: Sequence[Update], target: np.dtype
) -> MergedTensor:
    """Returns the tensor with the updates in it.

    Args:
      stored: `(experts, ...)`, or one expert's matrix.
      updates: all of this tensor.
      target: dtype of the result.
    """
    whole = stored if stored.ndim == 3 else stored[None]
    values = np.empty(whole.shape, target)
    before, change, error = 0.0, 0.0, 0.0
    for expert, matrix in enumerate(whole):
        old = matrix.astype(np.float32)
        new = old.copy()
        for update in updates:
            if update.rows.expert in (None, expert):
                by_output = new.T if update.rows.in_out else new
                by_output[update.rows.rows] += _product(update)
        with np.errstate(over="ignore"):  # The caller looks for infinities.
            values[expert] = new.astype(target)
        before += _square(old)
        change += _square(new - old)
        error += _square(new - values[expert].astype(np.float32))
    lengths = (before**0.5, change**0.5, error**0.5)
    return MergedTensor(values.reshape(stored.shape), *lengths)


def _product(update: Update) -> np.ndarray:
    product = update.b.astype(np.float32) @ update.a.astype(np.float32)
    return product * np.float32(update.factor)


def _square(values: np.ndarray) -> float:
    return float(np.sum(np.square(values), dtype=np.float64))
