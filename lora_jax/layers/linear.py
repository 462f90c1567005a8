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

from lora_jax.adapters import AdapterPart, LowRank
from lora_jax.layers.base import HostSlot, LoRALayer, Shape, Site, SlotSpec
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
        return {
            "a": jax.ShapeDtypeStruct((parts, site.max_rank, site.d_in), dtype),
            "b": jax.ShapeDtypeStruct((site.max_rank, site.d_out), dtype),
            "scale": jax.ShapeDtypeStruct((parts,), jnp.float32),
            "rank": jax.ShapeDtypeStruct((parts,), jnp.int32),
        }

    def faults(self, part: int | None, weights: AdapterPart) -> list[str]:
        """Returns why a pair cannot sit here: its kind, its widths, its rank."""
        if not isinstance(weights, LowRank):
            kind = type(weights).__name__
            return [f"a {kind} cannot be served by a linear layer; only LowRank pairs."]
        site = self.lora_site
        d_out = site.d_out if part is None else site.part_widths[part]
        rank, d_in = weights.a.shape
        found = []
        if d_in != site.d_in:
            found.append(f"lora_A has input width {d_in}, the layer has {site.d_in}.")
        if weights.b.shape[0] != d_out:
            found.append(
                f"lora_B has output width {weights.b.shape[0]}, the layer has {d_out}."
            )
        if rank > site.max_rank:
            found.append(
                f"rank {rank} exceeds max_lora_rank={site.max_rank}; "
                "raise max_lora_rank or retrain."
            )
        return found

    def pack(
        self, weights: Mapping[int | None, AdapterPart], dtype: np.dtype
    ) -> HostSlot:
        """Returns one slot's host arrays at this adapter's own largest rank.

        A pair for the whole fused layer (key None) lends its A to every part and its B
        rows to the part that owns them.
        """
        site = self.lora_site
        pairs = _per_part(weights, site.part_widths)
        rank = max(pair.a.shape[0] for pair in pairs.values())
        a = np.zeros((len(site.parts), rank, site.d_in), dtype)
        b = np.zeros((rank, site.d_out), dtype)
        scale = np.zeros(len(site.parts), np.float32)
        ranks = np.zeros(len(site.parts), np.int32)
        starts = np.cumsum([0, *site.part_widths])
        for part, pair in pairs.items():
            own = pair.a.shape[0]
            a[part, :own] = pair.a
            b[:own, starts[part] : starts[part + 1]] = pair.b.T
            scale[part], ranks[part] = pair.scale, own
        return {"a": a, "b": b, "scale": scale, "rank": ranks}


def add_delta(
    layer: LoRALayer, routing: Routing, inputs: jax.Array, outputs: jax.Array
) -> jax.Array:
    """Returns `outputs` plus the update of each row's slot.

    Raises:
      ValueError: if the routing was made for another number of rows.
    """
    site, slots = layer.lora_site, layer.lora_slots.get_value()
    rows = to_rows(inputs, site.shape.in_axes)
    check_rows(site, routing, rows)
    updated = lora_delta(
        rows,
        to_rows(outputs, site.shape.out_axes),
        slots["a"],
        slots["b"],
        scale=slots["scale"],
        rank=slots["rank"],
        routing=routing,
        part_widths=site.part_widths,
    )
    return from_rows(updated, site.shape.out_axes, outputs.shape)


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


def describe_linear(layer: nnx.Module, name: str) -> Shape:
    """Returns the shape of an `nnx.Linear`, or of any layer with a 2-D kernel."""
    return Shape(layer.in_features, ((name, layer.out_features),))


def describe_kernel(layer: nnx.Module, name: str) -> Shape:
    """Returns the shape of a layer that is known by its `(d_in, d_out)` kernel."""
    d_in, d_out = layer.kernel.shape
    return Shape(d_in, ((name, d_out),))


def describe_fused(layer: nnx.Module, name: str) -> Shape:
    """Returns the shape of a `FusedLinear`: its parts are the children's."""
    return Shape(layer.in_features, layer.parts)


def _per_part(
    weights: Mapping[int | None, AdapterPart], widths: tuple[int, ...]
) -> dict[int, LowRank]:
    pairs = {part: pair for part, pair in weights.items() if part is not None}
    whole = weights.get(None)
    if isinstance(whole, LowRank):
        starts = np.cumsum([0, *widths])
        for part in range(len(widths)):
            rows = whole.b[starts[part] : starts[part + 1]]
            pairs[part] = LowRank(whole.a, rows, whole.scale)
    return pairs  # type: ignore[return-value]
