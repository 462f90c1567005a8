"""The tensors of one module -> what they do to it. One row in `KINDS` for each kind.

A kind says which roles it needs and builds its part from them, or tells what is wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lora_jax.adapters.adapter import AdapterPart, LowRank
from lora_jax.adapters.config import Meaning
from lora_jax.adapters.names import Role


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file: its name there, and its values."""

    name: str
    array: np.ndarray


@dataclass(frozen=True)
class Built:
    """A part and how its scale was found, or the faults that keep it from being."""

    part: AdapterPart | None
    scale_rule: str
    faults: tuple[str, ...]


Tensors = Mapping[Role, Tensor]
Builder = Callable[[str, Tensors, Meaning], Built]


def build_low_rank(module: str, tensors: Tensors, meaning: Meaning) -> Built:
    """Builds a `LowRank` from `lora_A` and `lora_B`."""
    a, b = tensors[Role.A].array, tensors[Role.B].array
    found = pair_faults(module, tensors[Role.A], tensors[Role.B])
    if not found:
        found = rank_faults(module, a.shape[0], meaning)
    if found:
        return Built(None, "", tuple(found))
    scale, rule = meaning.scale_of(module, a.shape[0])
    return Built(LowRank(a, b, scale), rule, ())


def pair_faults(module: str, a: Tensor, b: Tensor) -> list[str]:
    """Faults of a pair `(rank, d_in)` and `(d_out, rank)` seen in it alone."""
    found = [
        f"{module}: {tensor.name} has shape {tensor.array.shape}, expected two axes, "
        "none of them empty"
        for tensor in (a, b)
        if tensor.array.ndim != 2 or 0 in tensor.array.shape
    ]
    if not found and a.array.shape[0] != b.array.shape[1]:
        found.append(
            f"{module}: rank {a.array.shape[0]} of lora_A {a.array.shape} is not the "
            f"rank {b.array.shape[1]} of lora_B {b.array.shape}"
        )
    return found


def rank_faults(module: str, rank: int, meaning: Meaning) -> list[str]:
    """The fault of a declared rank that is not the tensors'."""
    declared = meaning.rank_of(module)
    if declared in (None, rank):
        return []
    return [
        f"{module}: the tensors have rank {rank}, the config declares {declared}, so "
        "the scale is unknown; correct r or rank_pattern"
    ]


@dataclass(frozen=True)
class Kind:
    """A row of `KINDS`: the roles a kind needs and may have, and its builder."""

    needs: frozenset[Role]
    build: Builder
    may_have: frozenset[Role] = frozenset()


KINDS: tuple[Kind, ...] = (Kind(frozenset({Role.A, Role.B}), build_low_rank),)
"""The first row whose `needs` and `may_have` cover the module's roles counts."""
