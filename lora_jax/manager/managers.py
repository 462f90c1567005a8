"""The two managers: they join host, device and batch, and decide nothing themselves.

    add_adapter        pack -> plan -> host          rules.py decides who must go
    activate_adapter   plan -> device write -> table
    set_adapter_mapping          routing of the batch

Every method either does all of its work or raises and leaves tables, caches, slots and
the model's routing as they were. Every method may be called from any thread.

Source: vLLM's `LoRAModelManager` and `LRUCacheLoRAModelManager`: method names, return
values, exception types and texts, and the order of use are theirs.
"""

import threading
from collections.abc import Iterable
from typing import ClassVar

from flax import nnx

from lora_jax.adapters import Adapter
from lora_jax.bank import Bank, bank_dtype
from lora_jax.config import LoRAConfig
from lora_jax.layers import Sites, wrap
from lora_jax.manager.batch import BatchTier
from lora_jax.manager.device import DeviceTier
from lora_jax.manager.snapshot import Snapshot
from lora_jax.packing import Packed, pack
from lora_jax.routing import LoRAMapping, RoutingSet
from lora_jax.rules import FixedRules, LRURules, Rules
from lora_jax.slots import Hold, SlotTable


class LoRAModelManager:
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
        self.model = model
        self.config = config
        self._lock = threading.RLock()
        self._sites = wrap(model, config)
        self._dtype = bank_dtype(self._sites, config.lora_dtype)
        self._table = SlotTable(config.max_loras, config.host_capacity)
        self._adapters: dict[int, Adapter] = {}
        self._packed: dict[int, Packed] = {}
        self._device = DeviceTier(self._sites, config.max_loras, self._dtype)
        self._batch = BatchTier(self._sites)

    def __len__(self) -> int:
        return len(self._table.registered)

    @property
    def capacity(self) -> int:
        """Adapters that fit on the host (`max_cpu_loras`)."""
        return self._table.capacity

    @property
    def lora_slots(self) -> int:
        """Slots on the device (`max_loras`)."""
        return self._table.num_slots

    @property
    def adapter_slots(self) -> int:
        """The same as `lora_slots`; vLLM has both names."""
        return self._table.num_slots

    @property
    def lora_index_to_id(self) -> list[int | None]:
        """The adapter id in each slot, None where no id can reach it; a copy."""
        with self._lock:
            return list(self._table.index_to_id)

    @property
    def sites(self) -> Sites:
        """The model's LoRA layers, by module path."""
        return self._sites

    @property
    def bank(self) -> Bank:
        """All slots, now. Valid for as long as you keep it; see `snapshot`."""
        with self._lock:
            return self._device.bank

    @property
    def routing(self) -> RoutingSet:
        """Domain -> routing of the current mapping; empty for the base model alone."""
        with self._lock:
            return self._batch.routing

    def snapshot(self) -> Snapshot:
        """Returns slots and routing as one value that no later call changes."""
        with self._lock:
            return Snapshot(self._device.bank, self._batch.routing)

    def add_adapter(self, adapter: Adapter) -> bool:
        """Registers an adapter on the host; False if its id is registered already.

        Raises:
          AdapterError: if the model cannot serve it, naming every fault.
          RuntimeError: if the host is full (and, LRU, nobody may be evicted).
        """
        with self._lock:
            if adapter.id in self._table.registered:
                self._rules.added_again(self._table, adapter.id)
                return False
            packed = pack(adapter, self._sites, self._dtype)
            plan = self._rules.plan_registration(self._table, adapter.id)
            if plan.evicts is not None:
                self._forget(plan.evicts)
            self._table.register(plan)
            self._adapters[adapter.id] = adapter
            self._packed[adapter.id] = packed
            return True

    def activate_adapter(self, lora_id: int) -> bool:
        """Writes a registered adapter into a slot; False if it is in one already.

        Raises:
          KeyError: if the id is not registered.
          ValueError: if no slot is free (this manager).
          RuntimeError: if no slot is free and nobody may be evicted (LRU).
        """
        with self._lock:
            if lora_id in self._table.active:
                self._rules.activated_again(self._table, lora_id)
                return False
            plan = self._rules.plan_activation(self._table, lora_id)
            self._device.write(plan.slot, self._packed[lora_id])
            self._table.activate(plan)
            self._batch.follow(self._table.layout())
            return True

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Takes an adapter out of its slot, keeps it on the host; False if in none."""
        with self._lock:
            left = self._clear_slot(adapter_id)
            self._batch.follow(self._table.layout())
            return left

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forgets an adapter everywhere; False if it was not registered."""
        with self._lock:
            if adapter_id not in self._table.registered:
                return False
            self._forget(adapter_id)
            return True

    def remove_all_adapters(self) -> None:
        """Forgets every adapter, pinned ones too."""
        with self._lock:
            for id in list(self._table.registered):
                self._forget(id)

    def pin_adapter(self, lora_id: int) -> bool:
        """Activates an adapter if needed and keeps it from eviction; True.

        Raises:
          NotImplementedError: this manager evicts nobody.
          ValueError: if the id is not registered (LRU).
          RuntimeError: if no slot is free and nobody may be evicted (LRU).
        """
        with self._lock:
            self._rules.check_pin(self._table, lora_id)
            if lora_id not in self._table.active:
                self.activate_adapter(lora_id)
            self._table.registered.pin(lora_id)
            self._table.active.pin(lora_id)
            return True

    def list_adapters(self) -> dict[int, Adapter]:
        """Returns the registered adapters by id, least recently used first; a copy."""
        with self._lock:
            return {id: self._adapters[id] for id in self._table.registered}

    def get_adapter(self, adapter_id: int) -> Adapter | None:
        """Returns a registered adapter, which becomes the newest; None if absent."""
        with self._lock:
            if adapter_id not in self._table.registered:
                return None
            self._table.registered.touch(adapter_id)
            return self._adapters[adapter_id]

    def set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        """Says which adapter each row of the next batches uses.

        Computed anew only if the mapping or the slot table has changed.

        Raises:
          KeyError: naming the ids of the mapping that are in no slot.
        """
        with self._lock:
            self._batch.set(mapping, self._table.layout())

    def can_activate(self, ids: Iterable[int]) -> bool:
        """Says whether all of `ids` could be active at once. Changes nothing.

        False for an id that is not registered. After True, activating each of `ids`, in
        any order and with nothing else in between, succeeds and leaves all of them
        active.
        """
        with self._lock:
            return self._rules.can_activate(self._table, ids)

    def can_load(self, lora_id: int) -> bool:
        """Says whether an id, registered or not, could be registered and active.

        Changes nothing. After True, adding its adapter and activating it, with nothing
        else in between, does not fail for want of room.
        """
        with self._lock:
            if lora_id in self._table.registered:
                return self._rules.can_activate(self._table, [lora_id])
            try:
                plan = self._rules.plan_registration(self._table, lora_id)
                if plan.evicts not in self._table.active:
                    self._rules.plan_activation(self._table, lora_id)
            except KeyError:  # raised last, when a slot was found
                return True
            except (ValueError, RuntimeError):
                return False
            return True

    def is_pinned(self, lora_id: int) -> bool:
        """Says whether an adapter keeps its slot although nobody uses it."""
        with self._lock:
            return lora_id in self._table.active and self._table.active.is_pinned(
                lora_id
            )

    def hold(self, lora_id: int) -> Hold:
        """Activates an adapter if needed and claims its slot for a running request.

        While the claim lasts the slot keeps this very version, whatever happens to the
        id: it is not evicted, and after a removal or a reload the slot stays until
        `release`, out of reach for new requests.

        Raises:
          KeyError, ValueError, RuntimeError: as `activate_adapter`; ask `can_activate`.
        """
        with self._lock:
            self.activate_adapter(lora_id)
            return self._table.hold(lora_id)

    def release(self, hold: Hold) -> bool:
        """Ends a claim; False if it had ended already."""
        with self._lock:
            was_retired = hold.slot in self._table.retired
            released = self._table.release(hold)
            if was_retired and hold.slot not in self._table.retired:
                self._device.clear(hold.slot)
            return released

    def _forget(self, id: int) -> None:
        self._clear_slot(id)
        self._table.unregister(id)
        del self._adapters[id], self._packed[id]
        self._batch.follow(self._table.layout())

    def _clear_slot(self, id: int) -> bool:
        slot = self._table.slot_of(id)
        if slot is None:
            return False
        if not self._table.is_held(id):
            self._device.clear(slot)
        return self._table.deactivate(id)


class LRUCacheLoRAModelManager(LoRAModelManager):
    """Serves many adapters on one model; the least recently used make room.

    Neither pinned adapters nor those that a running request holds are evicted.
    """

    _rules: ClassVar[LRURules] = LRURules()

    def remove_oldest_adapter(self) -> bool:
        """Forgets the least recently used adapter; False if none is registered.

        Raises:
          RuntimeError: if all are pinned or held.
        """
        with self._lock:
            if not len(self):
                return False
            self._forget(self._rules.plan_eviction(self._table))
            return True
