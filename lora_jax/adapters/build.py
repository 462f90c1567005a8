"""Named tensors and a config -> an Adapter, or one error with every fault.

Each tensor ends in a module, in the report's ignored list, or in the error.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lora_jax.adapters.adapter import WEIGHT_DTYPES, Adapter, take_id
from lora_jax.adapters.config import Meaning, read_meaning
from lora_jax.adapters.content import hash_parts
from lora_jax.adapters.kinds import KINDS, Built, Tensor, Tensors
from lora_jax.adapters.names import Role, TensorName, read_name
from lora_jax.adapters.report import Ignored, ModuleReport, Report
from lora_jax.adapters.spellings import canonical
from lora_jax.errors import AdapterError, faults

MAX_FAULTS = 50
"""Faults told of one adapter; the rest are counted."""

SAMPLES = 3
"""Names shown of many of one kind."""


@dataclass(frozen=True)
class Source:
    """What is to become an adapter, and how strictly.

    Attributes:
      tensors: name in the file -> values.
      config: PEFT's config.
      where: path or other origin, for error texts.
      max_lora_rank: largest rank allowed, None for no limit.
      allow_nonfinite: whether NaN and infinity may pass.
    """

    tensors: Mapping[str, np.ndarray]
    config: Mapping[str, object]
    where: str
    max_lora_rank: int | None = None
    allow_nonfinite: bool = False


@dataclass
class _Draft:
    """What is known so far; used by one call of `build_adapter` only."""

    modules: dict[str, dict[Role, Tensor]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    built: dict[str, Built] = field(default_factory=dict)
    ignored: list[Ignored] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def build_adapter(source: Source, *, name: str, adapter_id: int | None) -> Adapter:
    """Builds and checks an adapter.

    Raises:
      AdapterError: naming the adapter, its origin, and every fault found.
    """
    draft = _Draft()
    meaning, config_faults = read_meaning(source.config)
    draft.faults += config_faults
    _group(source, draft)
    if meaning is not None:
        _build_parts(meaning, draft)
        _check_ranks(source, draft)
    if not draft.modules and not draft.faults:
        draft.faults.append("there is no LoRA tensor in it, so it would change nothing")
    if draft.faults or meaning is None:
        headline = f"adapter {name!r} ({source.where}) cannot be read:"
        raise AdapterError(faults(headline, _cut(draft.faults)))
    parts = {module: b.part for module, b in sorted(draft.built.items()) if b.part}
    return Adapter(
        name=name,
        id=take_id(adapter_id),
        parts=parts,
        content_hash=hash_parts(parts),
        report=_report(source, draft),
        base_model=meaning.base_model,
        config=source.config,
    )


def _cut(found: list[str]) -> list[str]:
    hidden = len(found) - MAX_FAULTS
    return [*found[:MAX_FAULTS], f"... and {hidden} more"] if hidden > 0 else found


def _group(source: Source, draft: _Draft) -> None:
    """Sorts the tensors by module and role; tells those that have no place."""
    unknown: list[str] = []
    adapters: set[str] = set()
    owners: dict[tuple[str, Role], str] = {}
    for tensor_name in sorted(source.tensors):
        parsed = read_name(tensor_name)
        if parsed is None:
            unknown.append(tensor_name)
            continue
        adapters.add(parsed.adapter)
        tensor = Tensor(tensor_name, source.tensors[tensor_name])
        found = _value_faults(parsed, tensor, source.allow_nonfinite)
        if found:
            draft.faults += found
            draft.broken.add(parsed.module)
        owner = owners.setdefault((canonical(parsed.module), parsed.role), tensor_name)
        if owner != tensor_name:
            draft.faults.append(f"{owner} and {tensor_name} are two spellings of one")
        draft.modules.setdefault(parsed.module, {})[parsed.role] = tensor
    if len(adapters) > 1:
        draft.faults.append(f"tensors of several adapters: {sorted(adapters)}")
    if unknown:
        draft.faults.append(_unknown_fault(unknown, source.tensors))


def _unknown_fault(unknown: list[str], tensors: Mapping[str, np.ndarray]) -> str:
    known = [name for name in sorted(tensors) if name not in set(unknown)]
    return (
        f"{len(unknown)} of {len(tensors)} tensors have names that are not known: "
        f"{_sample(unknown)}; known would be {_sample(known) or EXAMPLE}"
    )


EXAMPLE = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def _sample(names: list[str]) -> str:
    more = ", ..." if len(names) > SAMPLES else ""
    return ", ".join(names[:SAMPLES]) + more


def _value_faults(
    parsed: TensorName, tensor: Tensor, allow_nonfinite: bool
) -> list[str]:
    array = tensor.array
    if array.dtype not in WEIGHT_DTYPES:
        return [
            f"{parsed.module}: {tensor.name} is {array.dtype}, expected float32, "
            "float16, bfloat16 or float64; convert the file"
        ]
    if allow_nonfinite or np.isfinite(array).all():
        return []
    bad = int(array.size - np.isfinite(array).sum())
    return [
        f"{parsed.module}: {tensor.name} has {bad} of {array.size} values that are NaN "
        "or infinite; retrain it, or allow them with allow_nonfinite=True"
    ]


def _build_parts(meaning: Meaning, draft: _Draft) -> None:
    try:
        for module in sorted(draft.modules.keys() - draft.broken):
            built = _build_part(module, draft.modules[module], meaning)
            draft.faults += built.faults
            draft.built[module] = built
        draft.notes += [
            f"config: pattern {key!r} matches no module of the file"
            for key in meaning.unused_patterns(list(draft.modules))
        ]
    except ValueError as error:
        draft.faults.append(f"config: rank_pattern or alpha_pattern: {error}")


def _build_part(module: str, tensors: Tensors, meaning: Meaning) -> Built:
    roles = frozenset(tensors)
    for kind in KINDS:
        if kind.needs <= roles <= kind.needs | kind.may_have:
            return kind.build(module, tensors, meaning)
    there = ", ".join(sorted(tensor.name for tensor in tensors.values()))
    needs = " or ".join(sorted(_role_names(kind.needs) for kind in KINDS))
    return Built(None, "", (f"{module}: found only {there}; needed: {needs}",))


def _role_names(roles: frozenset[Role]) -> str:
    return " with ".join(sorted(role.value for role in roles))


def _check_ranks(source: Source, draft: _Draft) -> None:
    limit = source.max_lora_rank
    for module, built in draft.built.items():
        if limit is not None and built.part is not None and built.part.rank > limit:
            draft.faults.append(
                f"{module}: rank {built.part.rank} exceeds max_lora_rank={limit}; "
                "raise max_lora_rank, or reduce the adapter's rank"
            )


def _report(source: Source, draft: _Draft) -> Report:
    rows = [
        _module_report(module, draft.built[module], draft.modules[module])
        for module in sorted(draft.modules)
    ]
    ignored, notes = tuple(draft.ignored), tuple(draft.notes)
    return Report(tuple(rows), ignored, len(source.tensors), notes)


def _module_report(module: str, built: Built, tensors: Tensors) -> ModuleReport:
    part = built.part
    assert part is not None
    values = [getattr(part, f.name) for f in dataclasses.fields(part)]
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    return ModuleReport(
        module=module,
        kind=part.kind,
        tensors=tuple(sorted(tensor.name for tensor in tensors.values())),
        rank=part.rank,
        scale=getattr(part, "scale", 1.0),
        scale_rule=built.scale_rule,
        dtype="/".join(sorted({str(array.dtype) for array in arrays})),
        nbytes=sum(array.nbytes for array in arrays),
    )
