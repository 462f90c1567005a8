"""Who is registered, active, pinned and held: the manager's half that moves adapters.

    add_adapter        pack -> plan -> host          rules.py decides who must go
    activate_adapter   plan -> device write -> table

Every method either does all of its work or raises and leaves tables, caches, slots and
the model's routing as they were. Every method may be called from any thread.

Source: vLLM's `LoRAModelManager` and `LRUCacheLoRAModelManager`: method names, return
values, exception types and texts, and the order of use are theirs.
"""

import logging
import threading
from collections.abc import Iterable
from typing import ClassVar

from lora_jax.adapters import Adapter
from lora_jax.bank import bank_dtype
from lora_jax.config import LoRAConfig
from lora_jax.layers import Sites
from lora_jax.manager.prepared import Prepared, pins_host_memory
from lora_jax.manager.tiers import Tiers
from lora_jax.packing import pack
from lora_jax.rules import (
    Rules,
    can_load,
    check_batch_alone,
    check_room,
    held_among,
    plan_replacement,
)
from lora_jax.slots import Hold

LOG = logging.getLogger(__name__)


class AdapterRegistry:
    """Adapters in two tiers, under the rules of a subclass.

    Attributes:
      config: as given: how many adapters, of which rank.
      lock: held by every method; hold it to do several things at once.
    """

    _rules: ClassVar[Rules]

    def __init__(self, sites: Sites, config: LoRAConfig) -> None:
        self.config = config
        self.lock = threading.RLock()
        self._sites = sites
        self._dtype = bank_dtype(sites, config.lora_dtype)
        self._pins = pins_host_memory(config)
        self._tiers = Tiers(sites, config, self._dtype)
        self._table = self._tiers.table

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
        with self.lock:
            return list(self._table.index_to_id)

    def add_adapter(self, adapter: Adapter) -> bool:
        """Registers an adapter on the host; False if its id is registered already.

        Raises:
          AdapterError: if the model cannot serve it, naming every fault.
          RuntimeError: if the host is full (and, LRU, nobody may be evicted).
        """
        with self.lock:
            if self._is_known(adapter.id):
                return False
            return self.add_prepared(self.prepare(adapter))

    def prepare(self, adapter: Adapter) -> Prepared:
        """Returns an adapter checked and packed for this model; changes nothing.

        Slow work that needs no lock: call it on any thread, then `add_prepared`.

        Raises:
          AdapterError: if the model cannot serve it, naming every fault.
        """
        prepared = Prepared(adapter, pack(adapter, self._sites, self._dtype))
        if prepared.packed.left_out:
            LOG.warning("%s", prepared.report())
        return self._tiers.pin(prepared) if self._pins else prepared

    def prepared(self, adapter_id: int) -> Prepared | None:
        """Returns a registered adapter with its host copy, without using it."""
        with self.lock:
            return self._tiers.host.get(adapter_id)

    def send(self, prepared: Prepared) -> Prepared:
        """Returns the same with its copy to the device begun; on any thread.

        The copy takes one transfer per dtype and as much device memory as one slot,
        until the adapter is activated.
        """
        return self._tiers.send(prepared)

    def add_prepared(self, prepared: Prepared) -> bool:
        """Registers a prepared adapter; False if its id is registered already.

        Raises:
          RuntimeError: as `add_adapter`.
        """
        with self.lock:
            if self._is_known(prepared.adapter.id):
                return False
            plan = self._rules.plan_registration(self._table, prepared.adapter.id)
            self._tiers.register(plan, prepared)
            return True

    def load_prepared(self, prepared: Prepared) -> None:
        """Registers and activates a prepared adapter: both or, on an error, neither.

        Of a registered id the version that is there is activated.

        Raises:
          ValueError, RuntimeError: as `add_adapter` and `activate_adapter`.
        """
        with self.lock:
            id = prepared.adapter.id
            if not self._is_known(id):
                plan = check_room(self._rules, self._table, id)
                self._tiers.register(plan, prepared)
            self.activate_adapter(id)

    def replace_prepared(self, prepared: Prepared) -> None:
        """Puts another version under a registered id, in every tier where the id is.

        The id keeps its pins and becomes the newest. A request that holds the old
        version goes on with it, in its slot; everybody else gets the new one.

        Raises:
          KeyError: if the id is not registered.
          ValueError, RuntimeError: as `activate_adapter`, if the old version is held
            and there is no slot for the new one.
        """
        with self.lock:
            id = prepared.adapter.id
            if id not in self._table.registered:
                raise KeyError(f"adapter {id} is not registered; add it first.")
            plan = plan_replacement(self._rules, self._table, id)
            self._tiers.replace(prepared, plan)

    def activate_adapter(self, lora_id: int) -> bool:
        """Writes a registered adapter into a slot; False if it is in one already.

        Raises:
          KeyError: if the id is not registered.
          ValueError: if no slot is free (this manager).
          RuntimeError: if no slot is free and nobody may be evicted (LRU).
        """
        with self.lock:
            if lora_id in self._table.active:
                self._rules.activated_again(self._table, lora_id)
                self._tiers.stats.device_hits += 1
                self._tiers.used(lora_id)
                return False
            self._tiers.activate(self._rules.plan_activation(self._table, lora_id))
            return True

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Takes an adapter out of its slot, keeps it on the host; False if in none."""
        with self.lock:
            return self._tiers.deactivate(adapter_id)

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forgets an adapter everywhere; False if it was not registered."""
        with self.lock:
            if adapter_id not in self._table.registered:
                return False
            self._tiers.forget(adapter_id)
            return True

    def remove_all_adapters(self) -> None:
        """Forgets every adapter, pinned ones too."""
        with self.lock:
            for id in list(self._table.registered):
                self._tiers.forget(id)

    def pin_adapter(self, lora_id: int) -> bool:
        """Activates an adapter if needed and keeps it from eviction; True.

        Raises:
          NotImplementedError: this manager evicts nobody.
          ValueError: if the id is not registered (LRU).
          RuntimeError: if no slot is free and nobody may be evicted (LRU).
        """
        with self.lock:
            self._rules.check_pin(self._table, lora_id)
            if lora_id not in self._table.active:
                self.activate_adapter(lora_id)
            self._table.registered.pin(lora_id)
            self._table.active.pin(lora_id)
            return True

    def list_adapters(self) -> dict[int, Adapter]:
        """Returns the registered adapters by id, least recently used first; a copy."""
        with self.lock:
            return {id: self._tiers.host[id].adapter for id in self._table.registered}

    def get_adapter(self, adapter_id: int) -> Adapter | None:
        """Returns a registered adapter, which becomes the newest; None if absent."""
        with self.lock:
            if adapter_id not in self._table.registered:
                return None
            self._table.registered.touch(adapter_id)
            self._tiers.found(adapter_id)
            return self._tiers.host[adapter_id].adapter

    def can_activate(self, ids: Iterable[int]) -> bool:
        """Says whether all of `ids` could be active at once. Changes nothing.

        False for an id that is not registered. After True, activating each of `ids`, in
        any order and with nothing else in between, succeeds and leaves all of them
        active.
        """
        with self.lock:
            return self._rules.can_activate(self._table, ids)

    def check_batch(self, ids: Iterable[int], reloaded: Iterable[int] = ()) -> None:
        """Raises if `ids`, registered or not, cannot be registered and active at once.

        A held one that is `reloaded` needs a second slot, for its other version.

        Raises:
          ValueError: if slots are short (LoRAModelManager).
          RuntimeError: if the host is full; LRU: if pinned and held ones leave too
            little room in either tier.
        """
        with self.lock:
            twice = held_among(self._table, reloaded)
            self._rules.check_batch(self._table, ids, twice)

    def check_batch_alone(self, ids: Iterable[int], reloaded: Iterable[int]) -> None:
        """Raises ValueError if `ids` lack slots even when no other id is registered."""
        with self.lock:
            check_batch_alone(self._table, ids, held_among(self._table, reloaded))

    def can_load(self, lora_id: int) -> bool:
        """Says whether an id, registered or not, could be registered and active.

        Changes nothing. After True, adding its adapter and activating it, with nothing
        else in between, does not fail for want of room.
        """
        with self.lock:
            return can_load(self._rules, self._table, lora_id)

    def is_pinned(self, lora_id: int) -> bool:
        """Says whether an adapter keeps its slot although nobody uses it."""
        with self.lock:
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
        with self.lock:
            self.activate_adapter(lora_id)
            return self._table.hold(lora_id)

    def release(self, hold: Hold) -> bool:
        """Ends a claim; False if it had ended already."""
        with self.lock:
            return self._tiers.release(hold)

    def _is_known(self, id: int) -> bool:
        if id not in self._table.registered:
            return False
        self._rules.added_again(self._table, id)
        self._tiers.found(id)
        return True
