"""Moves adapters between host, device and batch, as planned. Decides nothing.

Each method carries out one plan and keeps the three tiers and the slot table in step:
the device first, because only it can fail; then the table, which cannot; then the
routing, which follows the table.
"""

import time

import numpy as np

from lora_jax.config import LoRAConfig
from lora_jax.layers import Sites
from lora_jax.manager.batch import BatchTier
from lora_jax.manager.device import DeviceTier
from lora_jax.manager.prepared import Prepared, pin, send
from lora_jax.manager.stats import Stats
from lora_jax.slots import Activation, Hold, Registration, SlotTable


class Tiers:
    """Where every adapter is.

    Attributes:
      table: who is where.
      host: id -> host copy of each registered adapter.
      device: the bank.
      batch: the current routing.
      stats: counters.
      last_used: id -> `time.monotonic()` of its last use, of registered adapters.
    """

    def __init__(self, sites: Sites, config: LoRAConfig, dtype: np.dtype) -> None:
        self.table = SlotTable(config.max_loras, config.host_capacity)
        self.stats = Stats()
        self.host: dict[int, Prepared] = {}
        self.device = DeviceTier(sites, config.max_loras, dtype, self.stats)
        self.batch = BatchTier(sites, config.row_budgets or {})
        self.last_used: dict[int, float] = {}

    def pin(self, prepared: Prepared) -> Prepared:
        """Returns the same with a host copy in pinned memory."""
        return pin(prepared, self.device.layout, self.device.place)

    def send(self, prepared: Prepared) -> Prepared:
        """Returns the same with its copy to the device begun."""
        return send(prepared, self.device.layout, self.device.place)

    def register(self, plan: Registration, prepared: Prepared) -> None:
        """Carries out a registration."""
        if plan.evicts is not None:
            self.forget(plan.evicts)
            self.stats.host_evictions += 1
        self.table.register(Registration(plan.id))
        self.host[plan.id] = prepared
        self.stats.added += 1
        self.used(plan.id)

    def activate(self, plan: Activation) -> None:
        """Carries out an activation."""
        self._write(plan.slot, plan.id)
        self.table.activate(plan)
        self.stats.device_misses += 1
        self.stats.device_evictions += plan.evicts is not None
        self.used(plan.id)
        self._follow()

    def deactivate(self, id: int) -> bool:
        """Takes an adapter out of its slot; False if it had none."""
        left = self._leave_slot(id)
        self._follow()
        return left

    def forget(self, id: int) -> None:
        """Takes a registered adapter out of every tier."""
        self._leave_slot(id)
        self.table.unregister(id)
        del self.host[id], self.last_used[id]
        self._follow()

    def replace(self, prepared: Prepared, plan: Activation | None) -> None:
        """Puts another version under a registered id; pins stay with the id.

        Args:
          prepared: the new version.
          plan: where it goes on the device; None: the id stays inactive.
        """
        id = prepared.adapter.id
        old, slot = self.host[id], self.table.slot_of(id)
        pinned = self.table.active.is_pinned(id)
        self.host[id] = prepared
        if plan is not None:
            try:
                self._write(plan.slot, id)
            except BaseException:
                self.host[id] = old
                raise
            if slot not in (None, plan.slot):
                self._leave_slot(id)
            self.table.deactivate(id)
            self.table.activate(plan)
            if pinned:
                self.table.active.pin(id)
        self.table.registered.touch(id)
        self.stats.reloaded += 1
        self.used(id)
        self._follow()

    def release(self, hold: Hold) -> bool:
        """Ends a claim; the last one on a retired slot empties it."""
        was_retired = hold.slot in self.table.retired
        released = self.table.release(hold)
        if was_retired and hold.slot not in self.table.retired:
            self.device.clear(hold.slot)
        return released

    def found(self, id: int) -> None:
        """Notes that an adapter asked for was registered already."""
        self.stats.host_hits += 1
        self.used(id)

    def used(self, id: int) -> None:
        """Notes the time of an adapter's use."""
        self.last_used[id] = time.monotonic()

    def _write(self, slot: int, id: int) -> None:
        prepared = self.host[id]
        self.device.write(slot, prepared)
        self.host[id] = prepared.arrived()

    def _leave_slot(self, id: int) -> bool:
        slot = self.table.slot_of(id)
        if slot is not None and not self.table.is_held(id):
            self.device.clear(slot)
        return self.table.deactivate(id)

    def _follow(self) -> None:
        self.batch.follow(self.table.layout())
