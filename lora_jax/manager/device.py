"""The device tier: one bank, written slot by slot, always visible to the model.

Knows which slot gets which values, not why. A write is in place when nobody else holds
the bank and otherwise leaves the old one valid (`ownership.py`), so whoever was given a
bank may keep it.
"""

import time

import numpy as np

from lora_jax.bank import (
    Bank,
    Staged,
    empty_bank,
    fits,
    room_for,
    stage,
    write,
    write_donated,
)
from lora_jax.layers import LoRASlots, Sites
from lora_jax.manager.ownership import References, count_references, is_sole_owner
from lora_jax.manager.stats import Stats
from lora_jax.packing import Packed

NOTHING = Packed("nothing", {}, {})
"""An adapter without weights: every site of its slot is zeros."""


class DeviceTier:
    """The bank of a wrapped model.

    Args:
      sites: the model's LoRA layers; their slot variables show the current bank.
      slots: number of slots.
      dtype: dtype of the factors.
      stats: where writes are counted.
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
        before = count_references(self._bank)
        self._show()
        after = count_references(self._bank)
        # What showing a bank adds to the counts of a site's dictionary and arrays.
        _, _, self._per_site, self._per_array, *_ = (
            b - a for a, b in zip(before, after, strict=True)
        )
        self._own: References = after

    @property
    def bank(self) -> Bank:
        """The current bank. It stays valid while anybody holds it."""
        return self._bank

    def write(self, slot: int, packed: Packed, staged: Staged | None = None) -> None:
        """Puts an adapter into a slot; nothing of the former occupant stays.

        Args:
          slot: where.
          packed: the adapter's host copy.
          staged: the same, staged before, perhaps on the device already.
        """
        start = time.perf_counter()
        grown = self._make_room(packed)
        if staged is None or not fits(self._bank, staged):
            staged = stage(self._bank, packed)
        if not grown and is_sole_owner(count_references(self._bank), self._own):
            self._bank = write_donated(self._bank, slot, staged)
        else:
            self._stats.copied_writes += not grown
            self._bank = write(self._bank, slot, staged)
        self._publish()
        self._stats.writes += 1
        self._stats.write_seconds += time.perf_counter() - start

    def clear(self, slot: int) -> None:
        """Fills a slot with zeros: it gets an adapter that adapts nothing."""
        self.write(slot, NOTHING)

    def _make_room(self, packed: Packed) -> bool:
        """Adds the arrays that the adapter's kind brings; says whether it did.

        Most arrays are then still those of the old bank, which others may hold, so the
        write that follows must not be in place.
        """
        before = self._bank
        self._bank = room_for(before, self._sites, packed)
        return self._bank is not before

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
