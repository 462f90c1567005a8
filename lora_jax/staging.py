"""One adapter, packed -> one flat buffer per dtype, in the order of the bank's arrays.

So an adapter crosses to the device in a few large transfers, whatever the number of its
arrays, and every adapter has the same shapes. Knows the layout of a slot, no bank.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import TypeVar

import jax
import numpy as np

from lora_jax.layers import Sites
from lora_jax.layers.base import SlotSpec
from lora_jax.packing import Packed

Staged = dict[str, np.ndarray] | dict[str, jax.Array]
"""Dtype name -> flat buffer: one adapter in the bank's layout, zero-padded. In host
memory, or already on the device."""

SlotLayout = dict[str, SlotSpec]
"""Site name -> array name -> shape and dtype of one slot."""

Leaf = TypeVar("Leaf")


def slot_layout(sites: Sites, dtype: np.dtype) -> SlotLayout:
    """Returns the layout of one slot of every site; `dtype` is that of the factors."""
    return {name: layer.slot_spec(dtype) for name, layer in sites.items()}


def stage_slot(layout: SlotLayout, packed: Packed) -> dict[str, np.ndarray]:
    """Returns the adapter as one flat zero-padded buffer per dtype, in host memory.

    Sites that the adapter leaves alone, and ranks above its own, are zeros in it: a
    write of the result leaves nothing of the slot's former occupant.

    Raises:
      ValueError: if the layout has no room for one of its arrays.
    """
    _check_room(layout, packed)
    sizes: dict[str, int] = {}
    for _, _, spec in in_order(layout):
        dtype = _name(spec.dtype)
        sizes[dtype] = sizes.get(dtype, 0) + math.prod(spec.shape)
    buffers = {dtype: np.zeros(size, dtype) for dtype, size in sizes.items()}
    starts = dict.fromkeys(buffers, 0)
    for name, key, spec in in_order(layout):
        dtype = _name(spec.dtype)
        start = starts[dtype]
        starts[dtype] = stop = start + math.prod(spec.shape)
        values = packed.sites.get(name, {}).get(key)
        if values is not None:
            corner = tuple(slice(size) for size in values.shape)
            buffers[dtype][start:stop].reshape(spec.shape)[corner] = values
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
