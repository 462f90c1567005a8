"""Named tensors and a config -> an Adapter, or one error with every fault.

Each tensor ends in a module, in the report's ignored list, or in the error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lora_jax.adapters.adapter import Adapter, take_id
from lora_jax.adapters.built import Built, Tensors
from lora_jax.adapters.config import Meaning, read_meaning
from lora_jax.adapters.content import hash_content
from lora_jax.adapters.expert_layout import with_orientations
from lora_jax.adapters.grouping import Groups, group_tensors
from lora_jax.adapters.kinds import KINDS
from lora_jax.adapters.mapper import NameMapper
from lora_jax.adapters.names import Role, read_name
from lora_jax.adapters.overflow import product_overflows
from lora_jax.adapters.parts import AdapterPart, arrays, is_zero, nested, scale_of
from lora_jax.adapters.report import ELSEWHERE, Ignored, ModuleReport, Report
from lora_jax.errors import AdapterError, faults

MAX_FAULTS = 50
"""Faults told of one adapter; the rest are counted."""


@dataclass(frozen=True)
class Source:
    """What is to become an adapter, and how strictly.

    Attributes:
      tensors: name in the file -> values.
      config: PEFT's config.
      where: path or other origin, for error texts.
      max_lora_rank: largest rank allowed, None for no limit.
      allow_nonfinite: whether NaN and infinity may pass.
      notes: facts about the origin for the report.
      origins: name in `tensors` -> name in the file, where they differ.
      read: names in the file that are not in `tensors` -> what was read from them.
      faults: what is already known to be wrong.
      mapper: the model's way with names.
      unread: names of the tensors of experts that other processes hold.
      local_experts: experts whose tensors were read; None: all.
    """

    tensors: Mapping[str, np.ndarray]
    config: Mapping[str, object]
    where: str
    max_lora_rank: int | None = None
    allow_nonfinite: bool = False
    notes: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)
    read: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    mapper: NameMapper = field(default_factory=NameMapper)
    unread: tuple[str, ...] = ()
    local_experts: range | None = None


def build_adapter(source: Source, *, name: str, adapter_id: int | None) -> Adapter:
    """Builds and checks an adapter.

    Raises:
      AdapterError: naming the adapter, its origin, and every fault found.
    """
    meaning, found = read_meaning(source.config)
    groups = group_tensors(
        source.tensors,
        meaning,
        source.mapper,
        allow_nonfinite=source.allow_nonfinite,
    )
    found += [*source.faults, *groups.faults]
    built: dict[str, Built] = {}
    notes: list[str] = list(source.notes)
    if meaning is not None:
        try:
            built = _build_parts(groups, meaning)
            here = [item.alias or m for m, item in built.items()]
            notes += meaning.absent([*here, *_modules(source.unread)])
        except ValueError as error:
            found.append(f"config: rank_pattern or alpha_pattern: {error}")
        found += [fault for item in built.values() for fault in item.faults]
        found += _limit_faults(built, source.max_lora_rank)
        found += [] if source.allow_nonfinite else _overflow_faults(built)
        found += _mapped_faults(built, source.mapper)
    if not groups.modules and not source.unread and not found:
        found.append("there is no LoRA tensor in it, so it would change nothing")
    if found or meaning is None:
        headline = f"adapter {name!r} ({source.where}) cannot be read:"
        raise AdapterError(faults(headline, _cut(found)))
    parts = _named_parts(built, source.mapper)
    if parts and all(is_zero(part) for part in parts.values()):
        notes.append("every update is zero, so the adapter changes nothing")
    copies = {source.mapper.map(m): copy for m, copy in groups.base_copies.items()}
    return Adapter(
        name=name,
        id=take_id(adapter_id),
        parts=parts,
        content_hash=hash_content(parts, meaning.invocation_tokens),
        report=_report(source, groups, built, notes),
        base_model=meaning.base_model,
        config=source.config,
        invocation_tokens=meaning.invocation_tokens,
        base_copies=copies,
        local_experts=source.local_experts,
    )


def _cut(found: list[str]) -> list[str]:
    hidden = len(found) - MAX_FAULTS
    return [*found[:MAX_FAULTS], f"... and {hidden} more"] if hidden > 0 else found


def _modules(names: tuple[str, ...]) -> list[str]:
    return [parsed.module for parsed in map(read_name, names) if parsed is not None]


def _build_parts(groups: Groups, meaning: Meaning) -> dict[str, Built]:
    return {
        module: _build_part(module, groups.modules[module], meaning)
        for module in sorted(groups.modules.keys() - groups.broken)
    }


def _build_part(module: str, tensors: Tensors, meaning: Meaning) -> Built:
    roles = frozenset(tensors)
    for kind in KINDS:
        fits = kind.needs <= roles <= kind.needs | kind.may_have
        if fits and kind.applies(module):
            return kind.build(module, tensors, meaning)
    there = ", ".join(sorted(tensor.name for tensor in tensors.values()))
    missing = _missing(roles)
    what = f"{missing} is missing" if missing else "these have no meaning together"
    return Built(None, "", (f"{module}: {what}; found only {there}",))


def _missing(roles: frozenset[Role]) -> str:
    """The roles without which others are half of something, "" where none are."""
    halves = (kind.needs - roles for kind in KINDS if kind.needs & roles)
    return " and ".join(role.value for role in next(filter(None, halves), ()))


def _named_parts(
    built: Mapping[str, Built], mapper: NameMapper
) -> dict[str, AdapterPart]:
    parts = {mapper.map(m): item.part for m, item in built.items() if item.part}
    return with_orientations(dict(sorted(parts.items())))


def _mapped_faults(built: Mapping[str, Built], mapper: NameMapper) -> list[str]:
    owners: dict[str, str] = {}
    return [
        f"{module}: has the model's name {name}, as {owners[name]} has"
        for module in built
        if owners.setdefault(name := mapper.map(module), module) != module
    ]


def _limit_faults(built: Mapping[str, Built], limit: int | None) -> list[str]:
    return [
        f"{module}: rank {item.part.rank} exceeds max_lora_rank={limit}; raise "
        "max_lora_rank, or reduce the adapter's rank"
        for module, item in built.items()
        if limit is not None and item.part is not None and item.part.rank > limit
    ]


def _overflow_faults(built: Mapping[str, Built]) -> list[str]:
    """Products that the file's own dtype cannot hold; only float16 is so narrow."""
    found = []
    for module, item in built.items():
        dtypes = {array.dtype for _, array in arrays(item.part)} if item.part else set()
        if item.part is not None and dtypes == {np.dtype(np.float16)}:
            fault = product_overflows(item.part, np.dtype(np.float16))
            found += (
                [] if fault is None else [f"{module}: {fault}; see allow_nonfinite"]
            )
    return found


def _report(
    source: Source, groups: Groups, built: Mapping[str, Built], notes: list[str]
) -> Report:
    rows = [
        _module_report(module, item, groups.modules[module], source.origins)
        for module, item in built.items()
    ]
    ignored = [
        *groups.ignored,
        *(Ignored(name, f"read as {what}") for name, what in source.read.items()),
        *(Ignored(name, ELSEWHERE) for name in source.unread),
    ]
    total = len(source.tensors) + len(source.read) + len(source.unread)
    report = Report(tuple(rows), tuple(ignored), total, tuple(notes))
    assert report.matched + len(ignored) == total
    return report


def _module_report(
    module: str, built: Built, tensors: Tensors, origins: Mapping[str, str]
) -> ModuleReport:
    part = built.part
    assert part is not None
    values = [array for _, array in arrays(part)]
    return ModuleReport(
        module=module,
        kind=" + ".join(inner.kind for inner in nested(part)),
        tensors=tuple(sorted(origins.get(t.name, t.name) for t in tensors.values())),
        rank=part.rank,
        scale=scale_of(part),
        scale_rule=built.scale_rule,
        dtype="/".join(sorted({str(array.dtype) for array in values})),
        nbytes=sum(array.nbytes for array in values),
    )
