"""Updates of all experts -> the factors of each, for experts of a known shape.

PEFT up to 0.18 stores the factors of `(experts, d_out, d_in)` parameters for the
transposed weight; from 0.19 on for the weight itself. For `(experts, d_in, d_out)`
parameters (gpt-oss) both are right, but 0.19 under transformers 4 writes the transposed
form too. Shapes tell which it is, unless the experts are square; then the sibling
parameter or `peft_version` does, and what is left is refused.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lora_jax.adapters.experts import DOWN, GATE_UP, experts_path
from lora_jax.adapters.parts import AdapterPart, ExpertPairs, ExpertsLowRank

UNNAMED = (GATE_UP, "up_proj", DOWN)
"""What a fused parameter may be that no config names."""

SINCE_STRAIGHT = (0, 19)
"""The first PEFT that stores the factors of the weight itself."""


@dataclass(frozen=True)
class ExpertShape:
    """What the model's experts are like.

    Attributes:
      experts: their number.
      d_in, d_out: widths of the projection.
      stored_in_out: whether the checkpoint keeps `(experts, d_in, d_out)`.
    """

    experts: int
    d_in: int
    d_out: int
    stored_in_out: bool


def expert_paths(module: str, part: AdapterPart) -> tuple[str, ...]:
    """Returns the model's paths that a module of an adapter may mean.

    One, but for a fused parameter that the config does not name.

    Example:
      >>> import numpy as np
      >>> flat = np.ones((6, 4), np.float32), np.ones((8, 6), np.float32)
      >>> expert_paths("mlp.experts", ExpertsLowRank(*flat, 1.0, 3, "gate_up_proj", ""))
      ('mlp.experts.gate_up_proj',)
    """
    if not isinstance(part, ExpertsLowRank):
        return (module,)
    names = (part.parameter,) if part.parameter else UNNAMED
    return tuple(f"{experts_path(module)}.{name}" for name in names)


def with_orientations(parts: Mapping[str, AdapterPart]) -> dict[str, AdapterPart]:
    """Returns the parts, told how PEFT stored them where two siblings show it.

    The widths of gate_up are `(d, 2 w)`, those of down `(w, d)`: no two widths make
    both orientations fit.
    """
    fused = {
        (experts_path(module), part.parameter): part
        for module, part in parts.items()
        if isinstance(part, ExpertsLowRank)
    }
    told = dict(parts)
    for module, part in parts.items():
        if isinstance(part, ExpertsLowRank):
            path = experts_path(module)
            swapped = _pair_swapped(fused.get((path, GATE_UP)), fused.get((path, DOWN)))
            told[module] = dataclasses.replace(part, swapped=swapped)
    return told


def _pair_swapped(
    gate_up: ExpertsLowRank | None, down: ExpertsLowRank | None
) -> bool | None:
    if gate_up is None or down is None:
        return None
    (p, q), (s, t) = _widths(gate_up), _widths(down)
    straight, swapped = (p, q) == (t, 2 * s), (q, p) == (s, 2 * t)
    return swapped if straight != swapped else None


def _widths(part: ExpertsLowRank) -> tuple[int, int]:
    return part.a.shape[1], part.b.shape[0]


def layout_faults(part: ExpertsLowRank | ExpertPairs, shape: ExpertShape) -> list[str]:
    """Returns why an update cannot be one of experts of this shape."""
    if isinstance(part, ExpertPairs):
        return _pairs_faults(part, shape)
    found = []
    if part.a.shape[0] != shape.experts * part.rank:
        found.append(
            f"lora_A has {part.a.shape[0]} rows, the layer's {shape.experts} experts "
            f"of rank {part.rank} need {shape.experts * part.rank}."
        )
    if _widths(part) not in (straight := (shape.d_in, shape.d_out), straight[::-1]):
        found.append(
            f"lora_A and lora_B have widths {_widths(part)}, the layer's experts "
            f"{straight}, or {straight[::-1]} as PEFT up to 0.18 stored them."
        )
    elif is_swapped(part, shape) is None:
        found.append(_ambiguity(part, shape))
    return found


def is_swapped(part: ExpertsLowRank, shape: ExpertShape) -> bool | None:
    """Returns whether the factors are the transposed weight's, None if unknown."""
    straight = _widths(part) == (shape.d_in, shape.d_out)
    if straight != (_widths(part) == (shape.d_out, shape.d_in)):
        return not straight
    version = re.match(r"(\d+)\.(\d+)", part.peft_version)
    if part.swapped is not None or version is None:
        return part.swapped
    is_old = (int(version[1]), int(version[2])) < SINCE_STRAIGHT
    if shape.stored_in_out:
        return False if is_old else None
    return is_old


def _ambiguity(part: ExpertsLowRank, shape: ExpertShape) -> str:
    text = (
        f"its experts are square ({shape.d_in}), so the factors fit both ways, and "
        f"peft_version {part.peft_version!r} does not tell which is meant; "
    )
    if shape.stored_in_out:
        return (
            text + "save gate_up_proj and down_proj in one adapter; or, if it was "
            "trained under transformers 5, write peft_version 0.18.1, whose layout is "
            "the same, into adapter_config.json."
        )
    return text + "write the peft_version that saved it into adapter_config.json."


def _pairs_faults(part: ExpertPairs, shape: ExpertShape) -> list[str]:
    found = []
    for name, factor, axis, width in (
        ("lora_A", part.a, 2, shape.d_in),
        ("lora_B", part.b, 1, shape.d_out),
    ):
        if factor.shape[0] not in (1, shape.experts) or factor.shape[axis] != width:
            experts = f"{shape.experts} experts (or 1)"
            found.append(
                f"{name} has shape {factor.shape}; the layer has {experts} of width "
                f"{width}."
            )
    return found


def expert_factors(
    part: ExpertsLowRank | ExpertPairs, shape: ExpertShape
) -> tuple[np.ndarray, np.ndarray]:
    """Returns `(experts, rank, d_in)` and `(experts, d_out, rank)`, as views."""
    if isinstance(part, ExpertPairs):
        a = np.broadcast_to(part.a, (shape.experts, *part.a.shape[1:]))
        return a, np.broadcast_to(part.b, (shape.experts, *part.b.shape[1:]))
    a = part.a.reshape(shape.experts, part.rank, -1)
    b = part.b.reshape(-1, part.rank, shape.experts).transpose(2, 0, 1)
    if is_swapped(part, shape):
        return b.transpose(0, 2, 1), a.transpose(0, 2, 1)
    return a, b
