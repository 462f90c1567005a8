"""LoRA for a linear layer, plain or fused: `y + scale * (x A^T) B`, per row.

Slot layout, for a layer of `parts` fused children (one for a plain layer):

    a      (slots, parts, max_rank, d_in)   rows contiguous along the wide axis
    b      (slots, max_rank, d_out)         part p owns its own columns of every row
    scale  (slots, parts) float32           applied in float32 on the rank-sized product
    rank   (slots, parts) int32             0: this slot does not adapt this part

The base layer's own forward runs first, whatever it does; the delta is added after.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.adapters import AdapterPart, DoRA, LowRank, ReplacedBias
from lora_jax.adapters.parts import nested
from lora_jax.layers.base import (
    HostSlot,
    LoRALayer,
    PartKey,
    Shape,
    Site,
    SlotSpec,
    zero,
)
from lora_jax.layers.baseweights import (
    base_bias,
    host_bias,
    host_kernel,
    shows_kernel,
)
from lora_jax.layers.extras import (
    BIAS,
    GAIN,
    apply_extras,
    bias_of,
    gain_of,
    pair_of,
)
from lora_jax.layers.placement import cut_as_base, implementation_of
from lora_jax.models.head import TiedHead
from lora_jax.models.linear import FusedLinear
from lora_kernels import Routing, lora_delta


class LoRALinear(LoRALayer):
    """Mixin over a layer that maps `(..., d_in)` to `(..., d_out)`."""

    # The base layer's further arguments (`out_sharding=`) pass through untouched.
    def __call__(self, inputs: jax.Array, *args: object, **kwargs: object) -> jax.Array:
        """Returns the base layer's output plus each row's low-rank update.

        Args:
          inputs: `(..., d_in)`; flattened, its rows are the routing's rows.
        Raises:
          ValueError: if the routing was made for another number of rows.
        """
        outputs = super().__call__(inputs, *args, **kwargs)  # type: ignore[misc]
        routing = self.lora_routing.get_value()
        if routing is None:
            return outputs
        return add_delta(self, routing, inputs, outputs)

    def slot_spec(self, dtype: jax.typing.DTypeLike) -> SlotSpec:
        """Returns the layout in this file's docstring, less the slot axis."""
        site, parts = self.lora_site, len(self.lora_site.parts)
        stack = () if site.layers is None else (site.layers,)
        shapes = {
            "a": ((parts, site.max_rank, site.d_in), dtype),
            "b": ((site.max_rank, site.d_out), dtype),
            "scale": ((parts,), jnp.float32),
            "rank": ((parts,), jnp.int32),
        }
        return {
            key: jax.ShapeDtypeStruct((*stack, *shape), kind)
            for key, (shape, kind) in shapes.items()
        }

    def extra_spec(self, key: str, values: np.ndarray) -> SlotSpec:
        """Returns the float32 bias or gain of one output row."""
        site = self.lora_site
        stack = () if site.layers is None else (site.layers,)
        row = jax.ShapeDtypeStruct((*stack, site.d_out), jnp.float32)
        return {key: row} if key in (BIAS, GAIN) else {}

    def zeros(self, part: PartKey, rank: int) -> AdapterPart | None:
        """Returns a pair for one part; None for several."""
        if not isinstance(part, int):
            return None
        width = self.lora_site.part_widths[part]
        pair = LowRank(zero(rank, self.lora_site.d_in), zero(width, rank), 1.0)
        return None if self.faults(part, pair) else pair

    def overlap(self, first: PartKey, second: PartKey) -> bool:
        """Says whether the two have an output column in common."""
        parts = len(self.lora_site.parts)
        return not set(_numbers(first, parts)).isdisjoint(_numbers(second, parts))

    def faults(self, part: PartKey, weights: AdapterPart) -> list[str]:
        """Returns why a part cannot sit here: its kind, its widths, its rank."""
        site = self.lora_site
        d_out = len(_columns(site, part))
        pair = pair_of(weights)
        if pair is None:
            return _bias_faults(weights, d_out)
        rank, d_in = pair.a.shape
        found = []
        if d_in != site.d_in:
            found.append(f"lora_A has input width {d_in}, the layer has {site.d_in}.")
        if pair.b.shape[0] != d_out:
            found.append(
                f"lora_B has output width {pair.b.shape[0]}, the layer has {d_out}."
            )
        if rank > site.max_rank:
            found.append(
                f"rank {rank} exceeds max_lora_rank={site.max_rank}; "
                "raise max_lora_rank or retrain."
            )
        is_dora = any(isinstance(inner, DoRA) for inner in nested(weights))
        if is_dora and not shows_kernel(self):
            found.append("DoRA needs the base layer's kernel, and this one shows none.")
        return found

    def pack(
        self,
        weights: Mapping[PartKey, AdapterPart],
        dtype: np.dtype,
        *,
        layer: int | None = None,
    ) -> HostSlot:
        """Returns one slot's host arrays at this adapter's own largest rank.

        A pair for several parts lends its A to each of them and its B rows to the part
        that owns them.
        """
        site = self.lora_site
        by_part = _per_part(site, weights)
        rank = max((pair.rank for pair in by_part.values()), default=0)
        a = np.zeros((len(site.parts), rank, site.d_in), dtype)
        b = np.zeros((rank, site.d_out), dtype)
        scale = np.zeros(len(site.parts), np.float32)
        ranks = np.zeros(len(site.parts), np.int32)
        for part, pair in by_part.items():
            a[part, : pair.rank] = pair.a
            b[: pair.rank, _columns(site, part)] = pair.b.T
            scale[part], ranks[part] = pair.scale, pair.rank
        slot = {"a": a, "b": b, "scale": scale, "rank": ranks}
        return slot | _pack_extras(self, weights, layer)


def add_delta(
    layer: LoRALayer, routing: Routing, inputs: jax.Array, outputs: jax.Array
) -> jax.Array:
    """Returns `outputs` plus the update of each row's slot.

    Raises:
      ValueError: if the routing was made for another number of rows.
    """
    site, slots = layer.lora_site, layer.lora_slots.get_value()
    rows, axes = to_rows(inputs, site.shape.in_axes), site.shape.out_axes
    check_rows(site, routing, rows)
    updated = lora_delta(
        rows,
        to_rows(outputs, axes),
        slots["a"],
        slots["b"],
        scale=slots["scale"],
        rank=slots["rank"],
        routing=routing,
        part_widths=site.part_widths,
        implementation=implementation_of(site),
    )
    updated = apply_extras(updated, slots, routing, base_bias(layer))
    return cut_as_base(site, outputs, from_rows(updated, axes, outputs.shape))


def to_rows(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns `(rows, width)`: `axes` flattened into the width, in their order."""
    moved = jnp.moveaxis(array, axes, range(-len(axes), 0))
    return moved.reshape(-1, math.prod(moved.shape[-len(axes) :]))


def from_rows(
    rows: jax.Array, axes: tuple[int, ...], shape: tuple[int, ...]
) -> jax.Array:
    """Returns `rows` in the given shape: the inverse of `to_rows`."""
    behind = [axis % len(shape) for axis in axes]
    before = [axis for axis in range(len(shape)) if axis not in behind]
    moved = rows.reshape([shape[axis] for axis in (*before, *behind)])
    return jnp.moveaxis(moved, range(-len(axes), 0), axes)


def check_rows(site: Site, routing: Routing, rows: jax.Array) -> None:
    """Raises ValueError if the layer sees another number of rows than the routing."""
    if rows.shape[0] != routing.slot.shape[0]:
        raise ValueError(
            f"{site.name}: the routing names {routing.slot.shape[0]} rows, but the "
            f"layer sees {rows.shape[0]}; give one id per row ({site.domain})."
        )


def describe_linear(layer: nnx.Linear | TiedHead, name: str) -> Shape:
    """Returns the shape of an `nnx.Linear`, or of any layer with a 2-D kernel."""
    return Shape(layer.in_features, ((name, layer.out_features),))


def describe_kernel(layer: nnx.Module, name: str) -> Shape:
    """Returns the shape of a layer that is known by its `(d_in, d_out)` kernel."""
    d_in, d_out = vars(layer)["kernel"].shape
    return Shape(d_in, ((name, d_out),))


def describe_fused(layer: FusedLinear, name: str) -> Shape:
    """Returns the shape of a `FusedLinear`: its parts are the children's."""
    return Shape(layer.in_features, layer.parts)


def _numbers(part: PartKey, parts: int) -> tuple[int, ...]:
    """The parts that a key means, in the order of its B rows."""
    if part is None:
        return tuple(range(parts))
    return part if isinstance(part, tuple) else (part,)


def _columns(site: Site, part: PartKey) -> np.ndarray:
    """The output columns that a key means, in the order of its B rows."""
    starts = np.cumsum([0, *site.part_widths])
    numbers = _numbers(part, len(site.parts))
    return np.concatenate([np.arange(*starts[n : n + 2]) for n in numbers])


def _per_part(site: Site, weights: Mapping[PartKey, AdapterPart]) -> dict[int, LowRank]:
    by_part: dict[int, LowRank] = {}
    for key, weight in weights.items():
        pair, start = pair_of(weight), 0
        if pair is None:
            continue
        for part in _numbers(key, len(site.parts)):
            stop = start + site.part_widths[part]
            by_part[part] = LowRank(pair.a, pair.b[start:stop], pair.scale)
            start = stop
    return by_part


def _pack_extras(
    layer: LoRALayer, weights: Mapping[PartKey, AdapterPart], number: int | None
) -> HostSlot:
    base = host_bias(layer, number)
    packed: HostSlot = {}
    for part, weight in weights.items():
        own = _columns(layer.lora_site, part)
        rows = {BIAS: bias_of(weight, None if base is None else base[own])}
        if any(isinstance(inner, DoRA) for inner in nested(weight)):
            rows[GAIN] = gain_of(weight, host_kernel(layer, number)[:, own])
        for key, row in rows.items():
            if row is not None:
                empty = np.zeros(layer.lora_site.d_out, np.float32)
                packed.setdefault(key, empty)[own] = row
    return packed


def _bias_faults(weights: AdapterPart, d_out: int) -> list[str]:
    if not isinstance(weights, ReplacedBias):
        kind = type(weights).__name__
        return [f"a {kind} cannot be served by a linear layer; LowRank pairs can."]
    if weights.bias.shape != (d_out,):
        return [f"the bias has shape {weights.bias.shape}, the layer's is ({d_out},)."]
    return []
