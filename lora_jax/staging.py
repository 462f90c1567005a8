"""One adapter, packed -> a few flat buffers, in the order of the bank's arrays.

So an adapter crosses to the device in a few large transfers, whatever the number of its
arrays, and every adapter has the same shapes. There is one buffer for each dtype, and
another for the arrays of experts that are spread over devices: with an axis of experts,
so that each device is sent the experts that it holds and no others. Arrays that are cut
otherwise travel whole: every device takes its own part of a flat buffer.

    "float32"              (values,)
    "float32, 8 experts"   (8, values of one expert)

Knows the layout of a slot, no bank.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lora_jax.layers import Sites
from lora_jax.layers.base import SlotSpec
from lora_jax.layers.placement import slot_cuts
from lora_jax.packing import Packed

Staged = dict[str, np.ndarray] | dict[str, jax.Array]
"""Name -> buffer: one adapter in the bank's layout, zero-padded. In host memory, or
already on the device."""

SlotLayout = dict[str, SlotSpec]
"""Site name -> array name -> shape and dtype of one slot; a sharding where the first
axis is of experts that are spread over devices."""

Leaf = TypeVar("Leaf")


def slot_layout(sites: Sites, dtype: np.dtype) -> SlotLayout:
    """Returns the layout of one slot of every site; `dtype` is that of the factors."""
    return {name: layer.slot_spec(dtype) for name, layer in sites.items()}


@dataclass(frozen=True)
class Spread:
    """Where the slots of a model lie that is on several devices.

    Attributes:
      mesh: all devices of the model.
      cuts: `(site, array, spec of one slot)` of each array that is cut, also of those
        that enter a bank later; all others are whole on every device.
      experts: sharding of one slot of the arrays whose first axis is of experts, which
        are all those of `expert_sites`; None: no experts are spread.
      expert_sites: names of those sites.
    """

    mesh: Mesh
    cuts: frozenset[tuple[str, str, PartitionSpec]]
    experts: NamedSharding | None = None
    expert_sites: frozenset[str] = frozenset()

    def of_slot(self, name: str, key: str) -> PartitionSpec:
        """Returns the spec of one slot of an array."""
        return self._by_array.get((name, key), PartitionSpec())

    def of(self, name: str, key: str, slot_axis: int) -> NamedSharding:
        """Returns the sharding of all slots of an array."""
        spec = self.of_slot(name, key)
        if spec:
            spec = PartitionSpec(*spec[:slot_axis], None, *spec[slot_axis:])
        return NamedSharding(self.mesh, spec)

    def share(self, name: str, key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of what each device holds of a slot of this shape."""
        spec = self.of_slot(name, key)
        return NamedSharding(self.mesh, spec).shard_shape(shape)

    @functools.cached_property
    def _by_array(self) -> dict[tuple[str, str], PartitionSpec]:
        return {(name, key): spec for name, key, spec in self.cuts}


def spread_of(sites: Sites, layout: SlotLayout) -> Spread | None:
    """Returns where the slots of a model's sites lie, None if on one device."""
    places = {name: layer.lora_site.place for name, layer in sites.items()}
    meshes = [place.mesh for place in places.values() if place is not None]
    if not meshes:
        return None
    of_experts = {
        (name, key): spec.sharding
        for name, specs in layout.items()
        for key, spec in specs.items()
        if isinstance(spec.sharding, NamedSharding)
    }
    cuts = {(name, key, sharding.spec) for (name, key), sharding in of_experts.items()}
    for name, place in places.items():
        if place is not None:
            own = slot_cuts(place, sites[name].lora_site.layers)
            cuts |= {(name, key, spec) for key, spec in own.items()}
    return Spread(
        meshes[0],
        frozenset(cuts),
        next(iter(of_experts.values()), None),
        frozenset(name for name, _ in of_experts),
    )


def array_place(
    spread: Spread | None, name: str, key: str, slot_axis: int
) -> NamedSharding | None:
    """Returns the sharding of all slots of an array, None for the default device."""
    return None if spread is None else spread.of(name, key, slot_axis)


def slot_place(spread: Spread | None, name: str) -> NamedSharding | None:
    """Returns the sharding of one slot of a site of experts, None for other sites."""
    return spread.experts if spread and name in spread.expert_sites else None


class Piece(NamedTuple):
    """Where the values of one array lie.

    Attributes:
      site, key: names of the array.
      spec: its shape and dtype in one slot.
      buffer: name of the buffer.
      columns: which of the buffer's last axis.
    """

    site: str
    key: str
    spec: jax.ShapeDtypeStruct
    buffer: str
    columns: slice


def pieces(layout: SlotLayout) -> Iterator[Piece]:
    """Yields every array's place in the buffers."""
    ends: dict[str, int] = {}
    for site, key, spec in in_order(layout):
        name = _buffer_name(spec)
        start = ends.get(name, 0)
        ends[name] = stop = start + math.prod(spec.shape[len(_experts(spec)) :])
        yield Piece(site, key, spec, name, slice(start, stop))


def buffer_shapes(layout: SlotLayout) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each buffer by name."""
    return {
        piece.buffer: (*_experts(piece.spec), piece.columns.stop)
        for piece in pieces(layout)  # The last piece of a buffer counts.
    }


def _buffer_name(spec: jax.ShapeDtypeStruct) -> str:
    name = _name(spec.dtype)
    return name if spec.sharding is None else f"{name}, {spec.shape[0]} experts"


def _experts(spec: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return () if spec.sharding is None else spec.shape[:1]


@dataclass(frozen=True)
class Place:
    """Where on the devices the buffers go.

    Attributes:
      whole: of the flat ones: on every device of the bank.
      spread: of those with an axis of experts: each device gets its own; None if
        there are none.
    """

    whole: Sharding
    spread: Sharding | None = None

    def of(self, staged: Staged) -> dict[str, Sharding]:
        """Returns the sharding of each buffer."""
        spread = self.spread or self.whole
        return {
            name: spread if buffer.ndim > 1 else self.whole
            for name, buffer in staged.items()
        }

    def put(self, staged: Staged) -> dict[str, jax.Array]:
        """Returns the buffers on their way: one transfer each, and to each device.

        To devices of several processes each process sends what its own hold; it need
        not know the rest.
        """
        places = self.of(staged)
        values = list(staged.values())
        if self.whole.is_fully_addressable or isinstance(values[0], jax.Array):
            return jax.device_put(dict(staged), places)
        return {
            name: jax.make_array_from_callback(
                buffer.shape, places[name], buffer.__getitem__
            )
            for name, buffer in staged.items()
        }

    def in_memory(self, kind: str) -> "Place":
        """Returns the same places in another memory of the same devices."""
        spread = None if self.spread is None else self.spread.with_memory_kind(kind)
        return Place(self.whole.with_memory_kind(kind), spread)


def stage_slot(layout: SlotLayout, packed: Packed) -> dict[str, np.ndarray]:
    """Returns the adapter as a few zero-padded buffers, in host memory.

    Sites that the adapter leaves alone, and ranks above its own, are zeros in it: a
    write of the result leaves nothing of the slot's former occupant.

    Raises:
      ValueError: if the layout has no room for one of its arrays.
    """
    _check_room(layout, packed)
    placed = list(pieces(layout))
    dtypes = {piece.buffer: piece.spec.dtype for piece in placed}
    buffers = {
        name: np.zeros(shape, dtypes[name])
        for name, shape in buffer_shapes(layout).items()
    }
    for site, key, spec, buffer, columns in placed:
        values = packed.sites.get(site, {}).get(key)
        if values is not None:
            corner = tuple(slice(size) for size in values.shape)
            buffers[buffer][..., columns].reshape(spec.shape)[corner] = values
    return buffers


@functools.cache
def _name(dtype: np.dtype) -> str:
    """NumPy makes the name anew at each access, and an adapter has many arrays."""
    return dtype.name


def _check_room(layout: SlotLayout, packed: Packed) -> None:
    """Values without a place would be lost, without an error."""
    lost = [
        f"{name} has no room for {key} {values.shape}"
        for name, arrays in packed.sites.items()
        for key, values in arrays.items()
        if not has_room(layout[name].get(key), values.shape)
    ]
    if lost:
        raise ValueError(f"{lost[0]} (of {len(lost)}); make it with room_for first.")


def has_room(spec: jax.ShapeDtypeStruct | None, corner: tuple[int, ...]) -> bool:
    """Says whether values of shape `corner` fit into an array of this shape."""
    return spec is not None and all(
        have >= need for have, need in zip(spec.shape, corner, strict=True)
    )


def in_order(
    arrays: Mapping[str, Mapping[str, Leaf]],
) -> Iterator[tuple[str, str, Leaf]]:
    """Every array in the order of the flat buffers.

    Sorted, because JAX rebuilds a dictionary in the order of its sorted keys: the order
    that a caller sees and the one that a jitted write sees differ ("10" < "2").
    """
    for name, site in sorted(arrays.items()):
        for key, leaf in sorted(site.items()):
            yield name, key, leaf
