"""What a kind builds from the tensors of one module: a part, or its faults."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lora_jax.adapters.config import Meaning
from lora_jax.adapters.names import Role
from lora_jax.adapters.parts import AdapterPart


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file: its name there, and its values."""

    name: str
    array: np.ndarray


@dataclass(frozen=True)
class Built:
    """A part, or the faults that keep it from being.

    Attributes:
      part: what is done to the module, None after a fault.
      scale_rule: how its scale was found.
      faults: what is wrong with it.
      alias: name that the config knows it by, "" for its module path.
    """

    part: AdapterPart | None
    scale_rule: str
    faults: tuple[str, ...]
    alias: str = ""


Tensors = Mapping[Role, Tensor]
Builder = Callable[[str, Tensors, Meaning], Built]

NO_SCALE = "none"
"""The rule of a part that has no scale."""


def pair_faults(module: str, a: Tensor, b: Tensor) -> list[str]:
    """Returns why two factors are no pair: an axis too many, or two ranks."""
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
    """Returns why the tensors' rank is not the one that the config declares."""
    declared = meaning.rank_of(module)
    if declared in (None, rank):
        return []
    return [
        f"{module}: the tensors have rank {rank}, the config declares {declared}, so "
        "the scale is unknown; correct r or rank_pattern"
    ]
