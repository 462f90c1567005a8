"""The device tier: one bank, written slot by slot, always visible to the model.

Knows which slot gets which values, not why. A write is in place when nobody else holds
the bank and otherwise leaves the old one valid (`ownership.py`), so whoever was given a
bank may keep it.
"""

import time
from weakref import WeakSet

import jax
import numpy as np
from jax.sharding import (
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from lora_jax.bank import (
    Bank,
    bank_layout,
    empty_bank,
    fits,
    room_for,
    write,
    write_donated,
)
from lora_jax.layers import LoRASlots, Sites
from lora_jax.manager.ownership import References, count_references, is_sole_owner
from lora_jax.manager.prepared import Prepared
from lora_jax.manager.stats import Stats
from lora_jax.packing import Packed
from lora_jax.staging import Place, Staged, stage_slot

NOTHING = Packed("nothing", {}, {})
"""An adapter without weights: every site of its slot is zeros."""


class DeviceTier:
    """The bank of a wrapped model.

    Args:
      sites: the model's LoRA layers; their slot variables show the current bank.
      slots: number of slots.
      dtype: dtype of the factors.
      stats: where writes are counted.

    Attributes:
      layout: shapes and dtypes of one slot; grows with the first adapter of a kind.
      place: where what is to be written goes: whole to every device of the bank, or in
        parts to the devices that hold its experts.
    """

    def __init__(self, sites: Sites, slots: int, dtype: np.dtype, stats: Stats) -> None:
        # The variables themselves, not the layers: wrapping the model again gives the
        # layers new ones, and this bank must not appear there.
        self._variables: dict[str, LoRASlots] = {
            name: layer.lora_slots for name, layer in sites.items()
        }
        self._stats = stats
        self._sites = sites
        self._bank = empty_bank(sites, slots, dtype)
        self.layout = bank_layout(self._bank)
        self.place = _beside(self._bank)
        self._has_room: WeakSet[Packed] = WeakSet()
        before = count_references(self._bank)
        self._show()
        after = count_references(self._bank)
        # What showing a bank adds to the counts of a site's dictionary and arrays.
        added = [b - a for a, b in zip(before, after, strict=True)]
        self._per_site, self._per_array = added[2:4] or (0, 0)
        self._own: References | None = after

    @property
    def bank(self) -> Bank:
        """The current bank. It stays valid while anybody holds it."""
        return self._bank

    def write(self, slot: int, prepared: Prepared) -> None:
        """Puts an adapter into a slot; nothing of the former occupant stays."""
        self._make_room(prepared.packed)
        for staged in (prepared.ahead, prepared.pinned):
            if staged is not None and fits(self._bank, staged):
                self._put(slot, staged)
                return
        self._put(slot, stage_slot(self.layout, prepared.packed))

    def clear(self, slot: int) -> None:
        """Fills a slot with zeros."""
        self._put(slot, stage_slot(self.layout, NOTHING))

    def _put(self, slot: int, staged: Staged) -> None:
        start = time.perf_counter()
        on_device = self.place.put(staged)
        if self._own is None:
            self._bank = write(self._bank, slot, on_device)
        elif is_sole_owner(count_references(self._bank), self._own):
            self._bank = write_donated(self._bank, slot, on_device)
        else:
            self._stats.copied_writes += 1
            self._bank = write(self._bank, slot, on_device)
        self._publish()
        self._stats.writes += 1
        self._stats.write_seconds += time.perf_counter() - start

    def _make_room(self, packed: Packed) -> None:
        """Adds the arrays that the first adapter of a kind brings.

        Most arrays are then still those of the old bank, which others may hold: nobody
        knows whose they are, so the next write must not be in place.
        """
        if packed in self._has_room:
            return
        grown = room_for(self._bank, self._sites, packed)
        if grown is not self._bank:
            self._bank = grown
            self.layout = bank_layout(grown)
            self._own = None
            self._show()
        self._has_room.add(packed)  # For good: a bank never shrinks.

    def _publish(self) -> None:
        # Counted before the variables show it: until then nobody else can reach it.
        # The bank is no argument here, because every frame that names it counts too.
        counted = count_references(self._bank)
        shown = [0, 0]
        for arrays in self._bank.arrays.values():
            shown += [self._per_site, *[self._per_array] * len(arrays)]
        self._own = [n + d for n, d in zip(counted, shown, strict=True)]
        self._show()

    def _show(self) -> None:
        for name, variable in self._variables.items():
            variable.set_value(self._bank.arrays[name])


def _beside(bank: Bank) -> Place:
    if bank.spread is not None:
        whole = NamedSharding(bank.spread.mesh, PartitionSpec())
        return Place(whole, bank.spread.experts)
    arrays = jax.tree.leaves(bank.arrays)
    sharding = arrays[0].sharding if arrays else SingleDeviceSharding(jax.devices()[0])
    return Place(sharding)
