"""An adapter made ready for one model, before it takes anybody's place.

Preparing reads no table and writes none, so it may run on any thread; whatever is wrong
with an adapter comes out here, while nothing has changed.

    packed    host, NumPy, at the adapter's own ranks
    pinned    host, a few flat buffers, together as large as a slot, in memory that a
              GPU reads without a copy by the CPU
    ahead     the same on the device already, until the first activation
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import jax

from lora_jax.adapters import Adapter
from lora_jax.config import LoRAConfig
from lora_jax.errors import faults
from lora_jax.layers.domains import VISION
from lora_jax.packing import Packed
from lora_jax.staging import Place, SlotLayout, stage_slot

PINNED = "pinned_host"
"""JAX's name for host memory whose pages cannot be swapped out."""

Buffers = dict[str, jax.Array]
"""Name -> buffer of one slot."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """An adapter with its host copy in the bank's layout.

    Attributes:
      adapter: as loaded.
      packed: the host copy at the adapter's own ranks.
      pinned: a second host copy, in pinned memory, or None.
      ahead: a copy on its way to the device, for the first activation, or None.
    """

    adapter: Adapter
    packed: Packed = field(repr=False)
    pinned: Buffers | None = field(default=None, repr=False)
    ahead: Buffers | None = field(default=None, repr=False)

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory: the file's values and the copies."""
        pinned = (self.pinned or {}).values()
        copy = self.packed.nbytes + sum(buffer.nbytes for buffer in pinned)
        return self.adapter.nbytes + copy

    @property
    def ahead_nbytes(self) -> int:
        """Bytes of device memory of the copy sent ahead."""
        return sum(buffer.nbytes for buffer in (self.ahead or {}).values())

    def report(self) -> str:
        """Returns how much of the adapter is served, and what is not, and why."""
        placed, left_out = self.packed.placed, self.packed.left_out
        total = len(placed) + len(left_out)
        lines = [
            f"{module}: {domain}; set enable_tower_connector_lora=True to serve it."
            for module, domain in left_out.items()
        ]
        headline = (
            f"adapter {self.adapter.name!r}: {len(placed)} of {total} modules served"
        )
        return faults(f"{headline}, left out:", lines) if lines else f"{headline}."

    def encoder_key(self, item_hash: str) -> str:
        """Returns the key under which a tower's output for one item may be cached.

        It holds the adapter's contents if the adapter changes what the tower or the
        connector computes; adapters of the language model alone share the output.

        Args:
          item_hash: hash of the image or other item.
        """
        changes_it = any(domain in VISION for domain in self.packed.domains)
        return f"{self.adapter.content_hash}:{item_hash}" if changes_it else item_hash

    def arrived(self) -> "Prepared":
        """Returns the same without the copy sent ahead, which is in a slot now."""
        return self if self.ahead is None else replace(self, ahead=None)


def pins_host_memory(config: LoRAConfig) -> bool:
    """Says whether a manager pins its host copies: as configured, or as fits."""
    if config.pin_host_memory is not None:
        return config.pin_host_memory
    device = jax.devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    return wants_pinned(device.platform, kinds)


def wants_pinned(platform: str, memory_kinds: Iterable[str]) -> bool:
    """Says whether host copies for such a device are worth pinning: on GPUs."""
    return platform == "gpu" and PINNED in memory_kinds


def pin(prepared: Prepared, layout: SlotLayout, place: Place) -> Prepared:
    """Returns the same with a host copy in pinned memory of the devices of `place`."""
    staged = stage_slot(layout, prepared.packed)
    return replace(prepared, pinned=place.in_memory(PINNED).put(staged))


def send(prepared: Prepared, layout: SlotLayout, place: Place) -> Prepared:
    """Returns the same with its copy to `place` begun: one transfer per buffer."""
    source = prepared.pinned or stage_slot(layout, prepared.packed)
    return replace(prepared, ahead=place.put(source))
