"""The batch tier: the routing of the current mapping, always visible to the model.

Kept per mapping type under (mapping, slot layout): the same mapping under another slot
table is another routing. When an adapter of the mapping has left its slot, its rows
have no right answer until the next mapping; running the model then is an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_jax.layers import Sites
from lora_jax.routing import (
    LoRAMapping,
    LoRAMappingType,
    RoutingSet,
    mapping_to_routing,
)
from lora_jax.shapes import CONNECTOR, DOMAINS, PROMPTS, TOKENS, TOWER
from lora_kernels import Routing

DOMAINS_OF = {
    LoRAMappingType.LANGUAGE: (TOKENS, PROMPTS),
    LoRAMappingType.TOWER: (TOWER,),
    LoRAMappingType.CONNECTOR: (CONNECTOR,),
}
"""Mapping type -> the domains whose rows it names."""

Layout = tuple[int | None, ...]
"""Adapter id in each slot."""


class StaleRouting(Routing):
    """Stands where a routing was, after an adapter of its mapping left its slot.

    It has none of a routing's arrays: whoever asks for one gets a RuntimeError. Built
    by `stale_routing`.
    """

    absent: tuple[int, ...]

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(_stale_text(self.absent))

    def __repr__(self) -> str:
        return f"StaleRouting(absent={self.absent})"


def stale_routing(absent: Sequence[int]) -> StaleRouting:
    """Returns a routing that refuses to be used, because `absent` are in no slot."""
    stale = object.__new__(StaleRouting)  # A routing's own constructor wants arrays.
    object.__setattr__(stale, "absent", tuple(absent))
    return stale


def _stale_text(absent: Sequence[int]) -> str:
    return (
        f"adapters {list(absent)} of the current mapping have left their slots; "
        "activate them and call set_adapter_mapping before the next run."
    )


@dataclass(frozen=True)
class _Routed:
    mapping: LoRAMapping
    layout: Layout
    routing: RoutingSet


class BatchTier:
    """The routing of a wrapped model.

    Args:
      sites: the model's LoRA layers; their routing variables show the current routing.
      budgets: domain -> the most rows of a mapping; any number in other domains.
    """

    def __init__(self, sites: Sites, budgets: Mapping[str, int]) -> None:
        self._sites = sites
        self._budgets = budgets
        self._routed: dict[LoRAMappingType, _Routed] = {}
        self._absent: dict[LoRAMappingType, list[int]] = {}
        self.computed = 0

    @property
    def routing(self) -> RoutingSet:
        """Domain -> routing; empty when no row has an adapter.

        Raises:
          RuntimeError: if an adapter of the mapping has left its slot: `{}` would run
            its rows, and all others, as the base model.
        """
        if self._absent:
            absent = {id for ids in self._absent.values() for id in ids}
            raise RuntimeError(_stale_text(sorted(absent)))
        return {
            domain: routing
            for routed in self._routed.values()
            for domain, routing in routed.routing.items()
        }

    def set(self, mapping: LoRAMapping, layout: Layout) -> None:
        """Makes `mapping` current.

        Raises:
          KeyError: naming ids that are in no slot.
          ValueError: if a domain has more rows than its budget.
        """
        self._check_budgets(mapping)
        last = self._routed.get(mapping.type)
        if last is None or (last.mapping, last.layout) != (mapping, layout):
            routing = mapping_to_routing(mapping, layout)
            self._routed[mapping.type] = _Routed(mapping, layout, routing)
            self.computed += 1
        self._absent.pop(mapping.type, None)
        self._show(mapping.type)

    def _check_budgets(self, mapping: LoRAMapping) -> None:
        rows = (mapping.index_mapping, mapping.prompt_mapping)
        for domain, ids in zip(DOMAINS_OF[mapping.type], rows, strict=False):
            if len(ids) > self._budgets.get(domain, len(ids)):
                raise ValueError(
                    f"the mapping has {len(ids)} rows for {domain}, row_budgets allows "
                    f"{self._budgets[domain]}; split the batch or raise the budget."
                )

    def follow(self, layout: Layout) -> None:
        """Adjusts the current routing to a slot table that has changed."""
        for kind, routed in list(self._routed.items()):
            absent = _absent(routed.mapping, layout)
            if absent:
                del self._routed[kind]
                self._absent[kind] = absent
                self._poison(kind, absent)
            else:
                self.set(routed.mapping, layout)

    def forget(self) -> None:
        """Drops every mapping: the model runs as the base model."""
        self._routed.clear()
        self._absent.clear()
        for domain in DOMAINS:
            self._sites.show_routing(domain, None)

    def _show(self, kind: LoRAMappingType) -> None:
        routing = self._routed[kind].routing
        for domain in DOMAINS_OF[kind]:
            self._sites.show_routing(domain, routing.get(domain))

    def _poison(self, kind: LoRAMappingType, absent: Sequence[int]) -> None:
        for domain in DOMAINS_OF[kind]:
            self._sites.show_routing(domain, stale_routing(absent))


def _absent(mapping: LoRAMapping, layout: Layout) -> list[int]:
    ids = {*mapping.index_mapping, *mapping.prompt_mapping}
    return sorted(id for id in ids if id > 0 and id not in layout)
