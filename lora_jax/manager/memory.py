"""What adapters cost in bytes, by tier, slot and site; also before a manager is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
from flax import nnx

from lora_jax.bank import bank_dtype
from lora_jax.config import LoRAConfig
from lora_jax.layers import wrap
from lora_jax.manager.prepared import pins_host_memory
from lora_jax.staging import SlotLayout, Spread, slot_layout, spread_of


@dataclass(frozen=True)
class Memory:
    """Bytes of LoRA weights. Printed, it is a short table.

    Attributes:
      slots: number of slots.
      sites: bytes of one slot, by site.
      shares: bytes of one slot on each device, by site, if the model is on several.
      host_capacity: adapters that the host may hold.
      host_copies: copies of each adapter on the host: the file's values, the bank's
        layout and, where host memory is pinned, a whole slot.
      adapters: bytes on the host of each registered adapter, by id.
      staged: bytes on the device of adapters sent ahead, not yet in a slot.

    Example:
      >>> Memory(slots=2, sites={"q_proj": 100, "o_proj": 50}, host_capacity=8).device
      300
    """

    slots: int
    sites: Mapping[str, int] = field(repr=False)
    host_capacity: int
    host_copies: int = 2
    adapters: Mapping[int, int] = field(default_factory=dict)
    staged: int = 0
    shares: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def slot(self) -> int:
        """Bytes of one slot: what one activation writes."""
        return sum(self.sites.values())

    @property
    def device(self) -> int:
        """Bytes on the device: all slots, from the start, and what was sent ahead.

        On several devices, what they repeat counts once; see `each_device`.
        """
        return self.slots * self.slot + self.staged

    @property
    def each_device(self) -> int:
        """Bytes of all slots on each of the devices on which the model lies."""
        return self.slots * sum((self.shares or self.sites).values())

    @property
    def host(self) -> int:
        """Bytes on the host of all registered adapters."""
        return sum(self.adapters.values())

    @property
    def host_at_most(self) -> int:
        """Bytes on the host if it is full of adapters of the largest rank."""
        return self.host_capacity * self.host_copies * self.slot

    def __str__(self) -> str:
        rows = [
            ("one slot", self.slot),
            (f"device, {self.slots} slots", self.device),
            *([("of that on each device", self.each_device)] if self.shares else []),
            (f"host, {len(self.adapters)} adapters", self.host),
            (f"host, at most {self.host_capacity} adapters", self.host_at_most),
        ]
        return "\n".join(f"{name:<32}{shown(value):>12}" for name, value in rows)


def memory_needed(model: nnx.Module, config: LoRAConfig) -> Memory:
    """Returns what a manager of `model` would need; the model stays as it is.

    Args:
      model: any Flax NNX model, its arrays real or `jax.ShapeDtypeStruct`.
      config: the options to try.
    Raises:
      ConfigError, ModelError: as the manager would.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
      >>> memory_needed(model, LoRAConfig(max_loras=4, max_lora_rank=2)).device
      544
    """
    trial = nnx.merge(*nnx.split(model))  # Same arrays, other objects: `wrap` edits.
    sites = wrap(trial, config)
    layout = slot_layout(sites, bank_dtype(sites, config.lora_dtype))
    copies = 3 if pins_host_memory(config) else 2
    return Memory(
        slots=config.max_loras,
        sites=site_bytes(layout),
        host_capacity=config.host_capacity,
        host_copies=copies,
        shares=site_shares(layout, spread_of(sites, layout)),
    )


def site_bytes(layout: SlotLayout) -> dict[str, int]:
    """Returns the bytes of one slot of each site."""
    return {
        name: sum(_nbytes(spec) for spec in site.values())
        for name, site in layout.items()
    }


def site_shares(layout: SlotLayout, spread: Spread | None) -> dict[str, int]:
    """Returns the bytes of one slot of each site on each device; `{}` if on one."""
    if spread is None:
        return {}
    return {
        name: sum(
            spec.dtype.itemsize * math.prod(spread.share(name, key, spec.shape))
            for key, spec in site.items()
        )
        for name, site in layout.items()
    }


def _nbytes(spec: jax.ShapeDtypeStruct) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def shown(value: int) -> str:
    """Returns a number of bytes for people.

    Example:
      >>> shown(3 * 2**19)
      '1.5 MiB'
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"
