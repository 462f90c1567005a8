"""Adapter + sites -> Packed: host arrays in the bank's layout, at its own rank.

Whether an adapter can be served by a model is decided here, completely and before any
state changes: every module of the adapter has its place and its shape, or one
`AdapterError` names every one that has not. NumPy only; nothing is on a device yet.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lora_jax.adapters import (
    Adapter,
    AdapterPart,
    FullModule,
    TokenRows,
    match_modules,
)
from lora_jax.adapters.expert_layout import expert_paths
from lora_jax.adapters.overflow import value_overflows
from lora_jax.basecopies import base_copy_faults
from lora_jax.errors import AdapterError, faults
from lora_jax.layers import Sites
from lora_jax.layers.base import HostSlot, PartKey
from lora_jax.layers.stacked import stack_hosts

SAMPLES = 3
"""Module paths shown of each side, so that another spelling can be seen."""

EXPERT = re.compile(r"experts\.[0-9]+\.")
"""A path of one expert."""


@dataclass(frozen=True, eq=False)
class Packed:
    """One adapter, ready to be written into any slot of a bank. Never mutated.

    Attributes:
      name: the adapter's name, for messages.
      sites: site name -> array name -> host values, each the corner of its slot's
        shape; sites without weights of the adapter are absent (their slot is zeros).
      placed: adapter module -> site that holds it.
      left_out: adapter module -> domain that the options leave alone ("tower").
      domains: domains of the sites that it adapts.
    """

    name: str
    sites: Mapping[str, HostSlot] = field(repr=False)
    placed: Mapping[str, str] = field(repr=False)
    left_out: Mapping[str, str] = field(default_factory=dict, repr=False)
    domains: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        arrays = (array for slot in self.sites.values() for array in slot.values())
        return sum(array.nbytes for array in arrays)


def pack(adapter: Adapter, sites: Sites, dtype: np.dtype) -> Packed:
    """Lays an adapter's weights out for the bank.

    Args:
      adapter: weights by module path.
      sites: the model's LoRA layers.
      dtype: dtype of the factors in the bank; scales stay float32.
    Raises:
      AdapterError: naming every module that has no site, every part whose kind, width
        or rank its site cannot hold, every value that `dtype` cannot hold, and every
        base layer that is not the one that the file has a copy of.
    """
    found, unknown, problems = _match(adapter, sites)
    matched = {m: name for m, name in found.items() if name in sites.targets}
    left_out = {m: sites.left_out[n] for m, n in found.items() if m not in matched}
    problems += _unknown_modules(unknown, sites, len(adapter.parts))
    grouped: Grouped = {}
    for module, name in matched.items():
        target = sites.targets[name]
        weights = adapter.parts[module]
        layer = sites[target.site]
        problems += [f"{module}: {text}" for text in layer.faults(target.part, weights)]
        taken = grouped.setdefault((target.site, target.layer), {})
        if any(layer.overlap(target.part, other) for other in taken):
            problems.append(f"{module}: another module of the file has this place too.")
        taken[target.part] = weights
    problems += _tie_token_rows(grouped, sites)
    problems += _vocabulary_faults(grouped, sites)
    problems += [f"{text}." for text in value_overflows(adapter.parts, dtype)]
    problems += base_copy_faults(adapter, sites)
    problems += _experts_left_out(adapter, sites)
    if not adapter.parts and adapter.local_experts is None:
        problems.append("the adapter adapts no module.")
    if left_out and not matched:
        domains = " and ".join(sorted(set(left_out.values())))
        problems.append(
            f"it adapts the {domains} alone; set enable_tower_connector_lora=True."
        )
    if problems:
        headline = f"adapter {adapter.name!r} cannot be served by this model:"
        raise AdapterError(faults(headline, problems))
    packed = _pack_sites(grouped, sites, dtype)
    placed = {module: sites.targets[name].site for module, name in matched.items()}
    domains = frozenset(sites[name].lora_site.domain for name in packed)
    return Packed(adapter.name, packed, placed, left_out, domains)


def _match(
    adapter: Adapter, sites: Sites
) -> tuple[dict[str, str], list[str], list[str]]:
    """Returns module -> the model's name for it, modules without one, and faults."""
    known = {*sites.targets, *sites.left_out}
    paths = {m: expert_paths(m, part) for m, part in adapter.parts.items()}
    names, _ = match_modules({p for some in paths.values() for p in some}, known)
    found, unknown, problems = {}, [], []
    for module, candidates in paths.items():
        here = [path for path in candidates if path in names]
        if len(candidates) > 1 and here:
            fits = [p for p in here if _fits(adapter.parts[module], names[p], sites)]
            if len(fits) != 1:
                shapes = " and ".join(path.rpartition(".")[2] for path in fits)
                problems.append(
                    f"{module}: target_parameters does not name it, and its shapes fit "
                    f"{shapes or 'no parameter here'}; add target_parameters to "
                    "adapter_config.json."
                )
                continue
            here = fits
        if here:
            found[module] = names[here[0]]
        else:
            unknown.append(module)
    return found, unknown, problems


def _fits(part: AdapterPart, name: str, sites: Sites) -> bool:
    target = sites.targets.get(name)
    return target is None or not sites[target.site].faults(target.part, part)


Grouped = dict[tuple[str, int | None], dict[PartKey, AdapterPart]]
"""(site, layer of a stack or None) -> part -> weights."""


def _pack_sites(grouped: Grouped, sites: Sites, dtype: np.dtype) -> dict[str, HostSlot]:
    packed: dict[str, HostSlot] = {}
    stacks: dict[str, dict[int, HostSlot]] = {}
    for (name, layer), parts in grouped.items():
        slot = sites[name].pack(parts, dtype, layer=layer)
        if layer is None:
            packed[name] = slot
        else:
            stacks.setdefault(name, {})[layer] = slot
    for name, slots in stacks.items():
        layers = sites[name].lora_site.layers
        assert layers is not None  # only stacks have targets with a layer
        packed[name] = stack_hosts(slots, layers)
    return packed


def _tie_token_rows(grouped: Grouped, sites: Sites) -> list[str]:
    """Rows trained in an embedding are also the rows of a head that is tied to it."""
    rows = [
        part
        for (name, _), parts in grouped.items()
        if name != sites.tied_head
        for part in parts.values()
        if isinstance(part, TokenRows)
    ]
    if not rows or sites.tied_head is None:
        return []
    if sites.tied_head not in sites:
        return [
            f"{sites.tied_head} is tied to the embedding whose tokens were trained, "
            "and target_modules leaves it out; add it."
        ]
    grouped.setdefault((sites.tied_head, None), {0: rows[0]})
    return []


def _vocabulary_faults(grouped: Grouped, sites: Sites) -> list[str]:
    """A head that draws tokens which no embedding of the adapter knows is refused."""
    rows = {
        sites[name].lora_site.kind: part.weight.shape[0]
        for (name, _), parts in grouped.items()
        for part in parts.values()
        if isinstance(part, FullModule)
    }
    heads = [n for n in sites if sites[n].lora_site.kind == "head"]
    base = sites[heads[0]].lora_site.d_out if heads else 0
    head, embedding = rows.get("head", 0), rows.get("embed", base)
    if head > max(base, embedding):
        return [
            f"the saved head has {head} tokens, the embedding {embedding}; save the "
            "embedding too (modules_to_save)."
        ]
    return []


def _experts_left_out(adapter: Adapter, sites: Sites) -> list[str]:
    """Experts held here that were not read from the file would run as the base's."""
    if not adapter.is_partial:
        return []
    held = {e for layer in sites.values() for e in layer.held_experts}
    missing = sorted(held - set(adapter.local_experts or ()))
    if not missing:
        return []
    return [
        f"it was read for the experts {adapter.local_experts} alone, and this process "
        f"holds {missing[0]} to {missing[-1]} too; load it without local_experts."
    ]


def _unknown_modules(unknown: list[str], sites: Sites, modules: int) -> list[str]:
    if not unknown:
        return []
    known = sorted({_kind_of(name) for name in sites.targets})
    problems = [
        f"{module}: not a module that this model can adapt." for module in unknown
    ]
    experts = max(
        (layer.lora_site.shape.experts for layer in sites.values()), default=0
    )
    if experts and any(EXPERT.search(module) for module in unknown):
        problems.append(f"the model's experts are numbered 0 to {experts - 1}.")
    here = ", ".join(sorted(sites.targets)[:SAMPLES])
    return [
        *problems,
        f"{len(unknown)} of {modules} modules have no place; this model (with its "
        f"target_modules) has {', '.join(known)}; its paths are {here}, ... and the "
        f"file's {', '.join(sorted(unknown)[:SAMPLES])}.",
    ]


def _kind_of(path: str) -> str:
    """The last name of a path; of an expert's, without its number."""
    *_, parent, last = ("", *path.split("."))
    if last.isdigit():
        return f"{parent}.*"
    return f"*.{last}" if parent.isdigit() and ".experts." in path else last
