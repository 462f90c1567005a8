"""A file's tensors -> by module and role, and the copies that are left aside.

Knows which tensors belong together and which change nothing; not what kinds there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lora_jax.adapters.adapter import WEIGHT_DTYPES
from lora_jax.adapters.built import Tensor
from lora_jax.adapters.config import Meaning
from lora_jax.adapters.copies import BaseCopy, copy_base
from lora_jax.adapters.mapper import NameMapper
from lora_jax.adapters.names import Role, TensorName, read_name
from lora_jax.adapters.report import Ignored
from lora_jax.adapters.spellings import canonical

SAMPLES = 3
"""Names shown of many of one kind."""

EXAMPLE = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

PLAIN = frozenset(
    {Role.BASE_WEIGHT, Role.BASE_BIAS, Role.ORIGINAL, Role.WEIGHT, Role.BIAS}
)
"""Roles whose names never have the adapter's name inside."""

SAVED = {Role.SAVED_WEIGHT: Role.WEIGHT, Role.SAVED_BIAS: Role.BIAS}
"""Second spellings that PEFT itself writes -> the role that they repeat."""


@dataclass
class Groups:
    """The tensors, sorted.

    Attributes:
      modules: module -> role -> tensor.
      ignored: tensors that change nothing, each with its reason.
      base_copies: module -> sample of the base weight that the file carries.
      broken: modules with a tensor whose values are of no use.
      faults: one text for each tensor that has no place.
    """

    modules: dict[str, dict[Role, Tensor]] = field(default_factory=dict)
    ignored: list[Ignored] = field(default_factory=list)
    base_copies: dict[str, BaseCopy] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


def group_tensors(
    tensors: Mapping[str, np.ndarray],
    meaning: Meaning | None,
    mapper: NameMapper,
    *,
    allow_nonfinite: bool,
) -> Groups:
    """Sorts the tensors; without a `meaning` every whole module may pass."""
    groups = Groups()
    unknown: list[str] = []
    inside: set[str] = set()
    owners: dict[tuple[str, Role], str] = {}
    skipped = [name for name in sorted(tensors) if mapper.skips(name)]
    groups.ignored += [Ignored(name, "the model skips this prefix") for name in skipped]
    for name in sorted(tensors.keys() - set(skipped)):
        parsed = read_name(name)
        if parsed is None or not _is_expected(parsed, meaning):
            unknown.append(name)
            continue
        if parsed.role not in PLAIN | SAVED.keys():
            inside.add(parsed.adapter)
        owner = owners.setdefault((canonical(parsed.module), parsed.role), name)
        if owner != name and parsed.role is not Role.ORIGINAL:
            groups.faults.append(f"{owner} and {name} are two spellings of one tensor")
        _place(groups, parsed, Tensor(name, tensors[name]), allow_nonfinite)
    for module, roles in groups.modules.items():
        _join_saved(groups, module, roles)
    groups.modules = {
        module: roles for module, roles in groups.modules.items() if roles
    }
    if len(inside) > 1:
        groups.faults.append(f"tensors of several adapters: {sorted(inside)}")
    if unknown:
        groups.faults.append(_unknown_fault(unknown, tensors))
    return groups


def _is_expected(parsed: TensorName, meaning: Meaning | None) -> bool:
    """Whether a tensor that may be any model's own is one of an adapter."""
    if meaning is None or parsed.role not in (Role.WEIGHT, Role.BIAS):
        return True
    if parsed.role is Role.BIAS and meaning.bias == "all":
        return True
    return meaning.saves(parsed.module)


def _place(
    groups: Groups, parsed: TensorName, tensor: Tensor, allow_nonfinite: bool
) -> None:
    if parsed.role is Role.BASE_WEIGHT:
        groups.ignored.append(Ignored(tensor.name, "copy of the base layer's weight"))
        groups.base_copies[parsed.module] = copy_base(tensor.array)
        return
    if parsed.role is Role.ORIGINAL:
        groups.ignored.append(Ignored(tensor.name, "copy of the untrained module"))
        return
    found = _value_faults(parsed.module, tensor, allow_nonfinite=allow_nonfinite)
    if found:
        groups.faults += found
        groups.broken.add(parsed.module)
    groups.modules.setdefault(parsed.module, {})[parsed.role] = tensor


def _value_faults(module: str, tensor: Tensor, *, allow_nonfinite: bool) -> list[str]:
    array = tensor.array
    if array.dtype not in WEIGHT_DTYPES:
        return [
            f"{module}: {tensor.name} is {array.dtype}, expected float32, float16, "
            "bfloat16 or float64; convert the file"
        ]
    if allow_nonfinite or np.isfinite(array).all():
        return []
    bad = int(array.size - np.isfinite(array).sum())
    return [
        f"{module}: {tensor.name} has {bad} of {array.size} values that are NaN or "
        "infinite; retrain it, or allow them with allow_nonfinite=True"
    ]


def _join_saved(groups: Groups, module: str, roles: dict[Role, Tensor]) -> None:
    """Gives `modules_to_save.weight` its plain role, or ignores it as a repetition."""
    for saved, plain in SAVED.items():
        tensor = roles.pop(saved, None)
        if tensor is None:
            continue
        other = roles.setdefault(plain, tensor)
        if other is tensor:
            continue
        if np.array_equal(other.array, tensor.array):
            groups.ignored.append(Ignored(tensor.name, f"repeats {other.name}"))
        else:
            groups.faults.append(
                f"{module}: {other.name} and {tensor.name} should be equal, and differ"
            )


def _unknown_fault(unknown: list[str], tensors: Mapping[str, np.ndarray]) -> str:
    strange = set(unknown)
    known = [name for name in sorted(tensors) if name not in strange]
    return (
        f"{len(unknown)} of {len(tensors)} tensors are not known to belong to a LoRA "
        f"adapter of this config: {_sample(unknown)}; known would be "
        f"{_sample(known) or EXAMPLE}"
    )


def _sample(names: list[str]) -> str:
    more = ", ..." if len(names) > SAMPLES else ""
    return ", ".join(names[:SAMPLES]) + more
