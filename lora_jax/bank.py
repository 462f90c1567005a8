"""All slots of all sites on the device, as one value; and the pure writes to it.

A bank is a pytree of arrays and knows nothing of which adapter sits where (`slots.py`).
`write` leaves the old bank valid (a running step may hold it); `write_donated` updates
in place and deletes the arrays that it was given. Both are one compiled program per
bank layout: the slot index is traced, the adapter's values arrive as a few buffers of
fixed shapes (`staging.py`), so no other rank, target set or slot compiles anything.

Slots lie as the base kernels do: cut over devices where those are. A write then moves
nothing between devices.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding

from lora_jax.layers import Sites
from lora_jax.layers.extras import EVERYWHERE
from lora_jax.packing import Packed
from lora_jax.staging import (
    SlotLayout,
    Spread,
    Staged,
    array_place,
    buffer_shapes,
    has_room,
    pieces,
    slot_place,
    spread_of,
    stage_slot,
)


@dataclass(frozen=True, eq=False, repr=False)
class Bank:
    """Every slot of every site.

    Attributes:
      arrays: site name -> array name -> `(slots, *slot shape)`; for a stack of layers
        `(layers, slots, ...)`.
      stacked: names of the sites that are stacks (static).
      spread: where the arrays lie if the model is on several devices (static), or
        None: all on one device.
    """

    arrays: dict[str, dict[str, jax.Array]]
    stacked: frozenset[str] = frozenset()
    spread: Spread | None = None

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        name, arrays = next((n, a) for n, a in self.arrays.items() if a)
        return next(iter(arrays.values())).shape[self.slot_axis(name)]

    def slot_axis(self, name: str) -> int:
        """Axis of a site's arrays that counts the slots."""
        return int(name in self.stacked)

    def place(self, name: str, key: str) -> NamedSharding | None:
        """Sharding of an array, None if it is on one device."""
        return array_place(self.spread, name, key, self.slot_axis(name))

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, all slots; what devices repeat counts once."""
        return sum(array.nbytes for array in jax.tree.leaves(self.arrays))

    def __repr__(self) -> str:
        if not self.arrays:
            return "Bank(sites=0)"
        leaves = jax.tree.leaves(self.arrays)  # Perhaps shapes alone, or traced.
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        size = f"{nbytes / 2**10:.1f} KiB"
        if nbytes >= 2**20:
            size = f"{nbytes / 2**20:.1f} MiB"
        return f"Bank(slots={self.num_slots}, sites={len(self.arrays)}, {size})"

    def _repr_html_(self) -> str:
        """A table of slots: largest rank, and how many sites each adapts."""
        ranks = [
            np.moveaxis(np.asarray(site["rank"]), self.slot_axis(name), 0)
            for name, site in self.arrays.items()
            if "rank" in site
        ]
        body = "".join(
            f"<tr><td>{slot}</td><td>{max(int(r[slot].max()) for r in ranks)}</td>"
            f"<td>{sum(bool(r[slot].any()) for r in ranks)}</td></tr>"
            for slot in range(self.num_slots)
        )
        head = "<th>slot</th><th>rank</th><th>sites</th>"
        return f"<p>{self!r}</p><table><tr>{head}</tr>{body}</table>"


Static = tuple[frozenset[str], Spread | None]


def _unflatten(static: Static, arrays: Iterable[object]) -> Bank:
    # Not through __init__: JAX also builds trees of shapes and shardings, which a
    # run-time type check of the field would refuse.
    bank = object.__new__(Bank)
    object.__setattr__(bank, "arrays", *arrays)
    for name, value in zip(("stacked", "spread"), static, strict=True):
        object.__setattr__(bank, name, value)
    return bank


jax.tree_util.register_pytree_with_keys(
    Bank,
    lambda bank: (
        ((jax.tree_util.GetAttrKey("arrays"), bank.arrays),),
        (bank.stacked, bank.spread),
    ),
    _unflatten,
)


def empty_bank(sites: Sites, slots: int, dtype: np.dtype) -> Bank:
    """Returns a bank of zeros, on the default device, or where the model lies.

    Args:
      sites: the LoRA layers; each states the shapes of one slot.
      slots: how many adapters the bank holds at once.
      dtype: dtype of the factors.
    """
    layout = {name: layer.slot_spec(dtype) for name, layer in sites.items()}
    stacked = [n for n, layer in sites.items() if layer.lora_site.layers is not None]
    bare = Bank({}, frozenset(stacked), spread_of(sites, layout))
    arrays = {
        name: {key: _zeros(bare, name, key, spec, slots) for key, spec in specs.items()}
        for name, specs in layout.items()
    }
    return Bank(arrays, bare.stacked, bare.spread)


def _zeros(
    bank: Bank, name: str, key: str, spec: jax.ShapeDtypeStruct, slots: int
) -> jax.Array:
    axis, place = bank.slot_axis(name), bank.place(name, key)
    shape = [*spec.shape[:axis], slots, *spec.shape[axis:]]
    if place is not None:
        return jnp.zeros(shape, spec.dtype, device=place)
    zeros = jnp.zeros(shape, spec.dtype)
    # Bound to its device, as every slot is once it is written: a program that was
    # compiled for arrays that may move compiles again for arrays that may not.
    traced = isinstance(zeros, Tracer)  # Shapes alone have no device.
    return zeros if traced else jax.device_put(zeros, zeros.sharding)


def room_for(bank: Bank, sites: Sites, packed: Packed) -> Bank:
    """Returns a bank with every array that an adapter brings, zeros where it is new.

    The arrays of a plain low-rank pair are always there, and then this is the given
    bank itself. The first adapter of another kind (a bias, DoRA, a head, ...) adds its
    arrays, and a step that is given the larger bank compiles anew: once for the kind
    and not for each adapter, because a bias or gain is then added to every site.
    """
    layout = bank_layout(bank)
    wanted: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
    for own, arrays in packed.sites.items():
        for key, values in arrays.items():
            if has_room(layout[own].get(key), values.shape):
                continue
            for name in sites if key in EVERYWHERE else (own,):
                spec = sites[name].extra_spec(key, values)
                wanted.setdefault(name, {}).update(spec)
    if not wanted:
        return bank
    grown = {name: dict(arrays) for name, arrays in bank.arrays.items()}
    for name, specs in wanted.items():
        for key, spec in specs.items():
            empty = _zeros(bank, name, key, spec, bank.num_slots)
            grown[name][key] = _enlarged(grown[name].get(key), empty)
    return Bank(grown, bank.stacked, bank.spread)


def _enlarged(array: jax.Array | None, empty: jax.Array) -> jax.Array:
    if array is None:
        return empty
    larger = jnp.maximum(jnp.array(array.shape), jnp.array(empty.shape)).tolist()
    padding = [(0, want - have) for want, have in zip(larger, array.shape, strict=True)]
    return jnp.pad(array, padding)


def bank_dtype(sites: Sites, lora_dtype: str) -> np.dtype:
    """Returns the dtype of the factors: `lora_dtype`, or the model's own for "auto"."""
    if lora_dtype != "auto":
        return np.dtype(lora_dtype)
    # Not every layer has weights of its own: a tied head borrows the embedding's.
    weights = (
        leaf
        for layer in sites.values()
        for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param))
    )
    # A quantised kernel holds integers beside its float scales.
    floats = (leaf for leaf in weights if jnp.issubdtype(leaf.dtype, jnp.floating))
    return np.dtype(next((leaf.dtype for leaf in floats), np.float32))


def bank_layout(bank: Bank) -> SlotLayout:
    """Returns the layout of one slot of every site, as the bank has it now."""
    return {
        name: {
            key: jax.ShapeDtypeStruct(
                _without(array.shape, bank.slot_axis(name)),
                array.dtype,
                sharding=slot_place(bank.spread, name),
            )
            for key, array in arrays.items()
        }
        for name, arrays in bank.arrays.items()
    }


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def stage(bank: Bank, packed: Packed) -> dict[str, np.ndarray]:
    """Returns the adapter as a few zero-padded buffers, in host memory."""
    return stage_slot(bank_layout(bank), packed)


def fits(bank: Bank, staged: Staged) -> bool:
    """Says whether an adapter was staged for a bank of this layout."""
    return buffer_shapes(bank_layout(bank)) == _shapes(staged)


def write(bank: Bank, slot: int, staged: Staged) -> Bank:
    """Returns a bank with `staged` in `slot`; the given bank stays valid."""
    return _write(bank, jnp.int32(slot), staged)


def write_donated(bank: Bank, slot: int, staged: Staged) -> Bank:
    """Returns a bank with `staged` in `slot`, in place: the given bank is deleted."""
    return _write_donated(bank, jnp.int32(slot), staged)


def clear(bank: Bank, slot: int) -> Bank:
    """Returns a bank whose `slot` is zeros; the given bank stays valid."""
    return write(bank, slot, stage(bank, Packed("nothing", {}, {})))


def _write_slot(bank: Bank, slot: jax.Array, staged: dict[str, jax.Array]) -> Bank:
    _check_layout(bank, staged)
    written: dict[str, dict[str, jax.Array]] = {name: {} for name in bank.arrays}
    for name, key, spec, buffer, columns in pieces(bank_layout(bank)):
        values = staged[buffer][..., columns].reshape(spec.shape)
        array = jax.lax.dynamic_update_index_in_dim(
            bank.arrays[name][key], values, slot, bank.slot_axis(name)
        )
        place = bank.place(name, key)
        if place is not None:
            array = jax.lax.with_sharding_constraint(array, place)
        written[name][key] = array
    return Bank(written, bank.stacked, bank.spread)


def _shapes(staged: Staged) -> dict[str, tuple[int, ...]]:
    return {name: buffer.shape for name, buffer in staged.items()}


def _check_layout(bank: Bank, staged: dict[str, jax.Array]) -> None:
    """A buffer of another layout would be cut at the wrong places, without an error."""
    if not fits(bank, staged):
        raise ValueError(
            f"the staged adapter has buffers of shapes {_shapes(staged)}, a slot of "
            f"the bank needs {buffer_shapes(bank_layout(bank))}; stage it for this "
            "bank."
        )


_write = jax.jit(_write_slot)
_write_donated = jax.jit(_write_slot, donate_argnums=0)
