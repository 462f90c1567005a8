"""The two managers: a model wrapped, its adapters, and the batch's routing.

They join what the other rooms do and decide nothing themselves.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar

from flax import nnx

from lora_jax.adapters import Adapter
from lora_jax.adapters.adapter import take_id
from lora_jax.bank import Bank
from lora_jax.config import LoRAConfig
from lora_jax.layers import Sites, wrap
from lora_jax.layers.domains import VISION
from lora_jax.layers.placement import rank_multiple
from lora_jax.manager.dummy import create_dummy
from lora_jax.manager.memory import Memory, shown, site_bytes, site_shares
from lora_jax.manager.registry import AdapterRegistry
from lora_jax.manager.slot_map import SlotRow, slot_rows, to_html, to_text
from lora_jax.manager.snapshot import Snapshot
from lora_jax.manager.stats import Stats
from lora_jax.routing import LoRAMapping, RoutingSet
from lora_jax.rules import FixedRules, LRURules, Rules
from lora_jax.shapes import BASE_ID

WARMUP_RANK = 8
"""Rank of the dummies of a warm-up: programs do not depend on it, memory does."""

LRU_RULES = LRURules()
"""Rules have no state: all LRU managers share them."""


class LoRAModelManager(AdapterRegistry):
    """Serves many adapters on one model; what does not fit is an error.

    Args:
      model: any Flax NNX model; its linear layers become LoRA layers, in place.
      config: how many adapters, of which rank, on which modules.

    Raises:
      ConfigError: if `target_modules` does not fit the model.
      ModelError: if the model has no layer that can carry LoRA.

    Example:
      >>> from flax import nnx
      >>> manager = LoRAModelManager(nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0))),
      ...                            LoRAConfig(max_loras=2, max_lora_rank=4))
      >>> manager.lora_index_to_id, len(manager), manager.capacity
      ([None, None], 0, 2)
    """

    _rules: ClassVar[Rules] = FixedRules()

    def __init__(self, model: nnx.Module, config: LoRAConfig) -> None:
        super().__init__(wrap(model, config), config)
        self.model = model

    @property
    def sites(self) -> Sites:
        """The model's LoRA layers, by module path."""
        return self._sites

    @property
    def bank(self) -> Bank:
        """All slots, now. Valid for as long as you keep it; see `snapshot`."""
        with self.lock:
            return self._tiers.device.bank

    @property
    def routing(self) -> RoutingSet:
        """Domain -> routing of the current mapping; empty for the base model alone.

        Raises:
          RuntimeError: if an adapter of the mapping has left its slot since.
        """
        with self.lock:
            return self._tiers.batch.routing

    @property
    def stats(self) -> Stats:
        """What has been done so far, in numbers; they go on counting."""
        return self._tiers.stats

    def memory(self) -> Memory:
        """Returns the bytes in use by tier, slot and site.

        `memory_needed(model, config)` says what a configuration would need.
        """
        with self.lock:
            host, layout = self._tiers.host, self._tiers.device.layout
            return Memory(
                slots=self.lora_slots,
                sites=site_bytes(layout),
                host_capacity=self.capacity,
                host_copies=3 if self._pins else 2,
                adapters={id: host[id].host_nbytes for id in self._table.registered},
                staged=sum(prepared.ahead_nbytes for prepared in host.values()),
                shares=site_shares(layout, self._tiers.device.bank.spread),
            )

    def create_dummy_lora(
        self, lora_id: int, rank: int, embedding_modules: Collection[str] = ()
    ) -> Adapter:
        """Returns an adapter of zeros on every layer that can have one, heads too.

        Args:
          lora_id: its id.
          rank: of every pair, at most `max_lora_rank`.
          embedding_modules: last names of the embeddings that it adapts as well.
        """
        return create_dummy(self._sites, lora_id, rank, embeddings=embedding_modules)

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        """Returns the rank for dummies: the default, within `max_lora_rank`.

        Where fully sharded slots cut the rank over devices, it is rounded up to a
        multiple of these, so that each has the same share.
        """
        least = rank_multiple(self._sites)
        rank = min(default_rank, self.config.max_lora_rank)
        return -(-rank // least) * least

    def warmup(
        self, token_buckets: Iterable[int], run: Callable[[int], object]
    ) -> None:
        """Compiles what batches of these sizes need, then forgets the dummies.

        Slot writes, both in place and copying, the routing of each size, and whatever
        `run` compiles: it is called with a mapping in force, once for a batch with all
        slots in use and once for base rows alone. Kinds of adapter that enlarge the
        bank (biases, DoRA, embeddings, ...) still compile when the first one comes.

        Args:
          token_buckets: numbers of rows that later batches have, padding included.
          run: runs the model on that many rows, e.g.
            `lambda rows: model(jnp.zeros((1, rows), jnp.int32))`.
        Raises:
          RuntimeError: if adapters are registered; warm up before adding any.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
          >>> manager = LoRAModelManager(model, LoRAConfig())
          >>> manager.warmup([2, 8], lambda rows: model(jnp.zeros((rows, 4))))
        """
        with self.lock:
            if len(self):
                raise RuntimeError(
                    f"warmup needs an empty manager, {len(self)} adapters are "
                    "registered; call it before the first add_adapter."
                )
            try:
                self._warm_up(token_buckets, run)
            finally:
                self.remove_all_adapters()
                self._tiers.batch.forget()

    def _warm_up(
        self, token_buckets: Iterable[int], run: Callable[[int], object]
    ) -> None:
        rank = self.get_dummy_lora_warmup_rank(WARMUP_RANK)
        ids = [take_id(None) for _ in range(self.lora_slots)]
        for id in ids:
            self.add_adapter(self.create_dummy_lora(id, rank))
            held = self.bank  # So this write copies, and the next is in place.
            self.activate_adapter(id)
            del held
            self.deactivate_adapter(id)
            self.activate_adapter(id)
        cycle = (*ids, BASE_ID)
        for rows in token_buckets:
            for mapping in (_in_turn(cycle, rows), _in_turn((BASE_ID,), rows)):
                self.set_adapter_mapping(mapping)
                run(rows)

    @property
    def supports_tower_connector_lora(self) -> bool:
        """Whether adapters of the vision tower and the connector are served."""
        domains = {layer.lora_site.domain for layer in self._sites.values()}
        return not VISION.isdisjoint(domains)

    def slot_map(self) -> list[SlotRow]:
        """Returns who sits in which slot; `print(manager)` shows it as a table."""
        with self.lock:
            return slot_rows(self._tiers)

    def metrics(self) -> dict[str, int | float]:
        """Returns the counters of `stats` and the present state, as plain numbers."""
        with self.lock:
            memory, table = self.memory(), self._table
            return self.stats.as_dict() | {
                "slots": table.num_slots,
                "slots_free": len(table.free_slots()),
                "slots_retired": len(table.retired),
                "adapters_registered": len(table.registered),
                "adapters_active": len(table.active),
                "adapters_pinned": len(table.registered.pinned),
                "adapters_held": len(table.holds),
                "host_capacity": table.capacity,
                "host_bytes": memory.host,
                "device_bytes": memory.device,
                "slot_bytes": memory.slot,
            }

    def __repr__(self) -> str:
        with self.lock:
            return to_text(self._headline(), self.slot_map())

    def _repr_html_(self) -> str:
        with self.lock:
            return to_html(self._headline(), self.slot_map())

    def _headline(self) -> str:
        table, memory = self._table, self.memory()
        return (
            f"{type(self).__name__}: {len(table.active)} of {table.num_slots} slots, "
            f"{len(self)} of {self.capacity} adapters, "
            f"{shown(memory.device)} on the device"
        )

    def snapshot(self) -> Snapshot:
        """Returns slots and routing as one value that no later call changes.

        Raises:
          RuntimeError: if an adapter of the mapping has left its slot since.
        """
        with self.lock:
            return Snapshot(self._tiers.device.bank, self._tiers.batch.routing)

    def set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        """Says which adapter each row of the next batches uses.

        Computed anew only if the mapping or the slot table has changed.

        Raises:
          KeyError: naming the ids of the mapping that are in no slot.
          ValueError: if a domain has more rows than `row_budgets` allows.
        """
        with self.lock:
            self._tiers.batch.set(mapping, self._table.layout())


def _in_turn(ids: Sequence[int], rows: int) -> LoRAMapping:
    taken = [ids[row % len(ids)] for row in range(rows)]
    return LoRAMapping(taken, taken)


class LRUCacheLoRAModelManager(LoRAModelManager):
    """Serves many adapters on one model; the least recently used make room.

    Neither pinned adapters nor those that a running request holds are evicted.
    """

    _rules: ClassVar[Rules] = LRU_RULES

    def remove_oldest_adapter(self) -> bool:
        """Forgets the least recently used adapter; False if none is registered.

        Raises:
          RuntimeError: if all are pinned or held.
        """
        with self.lock:
            if not len(self):
                return False
            self._tiers.forget(LRU_RULES.plan_eviction(self._table))
            self._tiers.stats.host_evictions += 1
            return True
