"""Gradients of `lora_delta`: same routing, products with a ragged contracting side."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lora_kernels.lora_delta.xla_forms import Site, kept_b, part_of_column
from lora_kernels.routing import Routing


class Gradients(NamedTuple):
    """Cotangents of the differentiable arguments, each in its argument's dtype."""

    x: Float[Array, "tokens d_in"]
    a: Float[Array, "slots parts max_rank d_in"]
    b: Float[Array, "slots max_rank d_out"]
    scale: Float[Array, "slots parts"]
    weight: Float[Array, " tokens"]


def lora_delta_backward(
    x: Float[Array, "tokens d_in"],
    g: Float[Array, "tokens d_out"],
    a: Float[Array, "slots parts max_rank d_in"],
    b: Float[Array, "slots max_rank d_out"],
    *,
    scale: Float[Array, "slots parts"],
    rank: Int32[Array, "slots parts"],
    routing: Routing,
    part_widths: tuple[int, ...],
) -> Gradients:
    """Returns the cotangents of x, a, b, scale and weight for the cotangent `g` of y.

    With `u = x A^T` and `v = g B^T` of a row's own slot, both `(parts, rank)`:

        dx = (v * scale * weight) A          dA = sum over the slot's rows of
        d weight = sum of scale * u * v           (v * scale * weight)^T x
        d scale = sum of weight * u * v      dB = ... (u * scale * weight)^T g

    Rows of other slots are selected to 0 before a sum over rows meets them.
    """
    site = Site(a, b, scale, rank, part_widths)
    x32, g32 = x.astype(jnp.float32), g.astype(jnp.float32)
    part = part_of_column(part_widths)

    def one_slot(
        carry: tuple[Array, Array], slot: Int32[Array, ""]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
        dx, dweight = carry
        mine = routing.slot == slot
        kept = jnp.arange(a.shape[2])[None, :] < rank[slot][:, None]  # [p, r]
        own_x = jnp.where(mine[:, None], x32, 0)
        own_g = jnp.where(mine[:, None], g32, 0)
        own_weight = jnp.where(mine, routing.weight, 0)
        own_a = jnp.where(kept[:, :, None], a[slot], 0).astype(jnp.float32)
        own_b = kept_b(site, slot).astype(jnp.float32)
        g_parts = jnp.where(
            part[None, None, :] == jnp.arange(len(part_widths))[None, :, None],
            own_g[:, None, :],
            0,
        )
        u = jnp.einsum("ti,pri->tpr", own_x, own_a)
        v = jnp.einsum("tpo,ro->tpr", g_parts, own_b)
        factor = own_weight[:, None, None] * scale[slot][None, :, None]
        dx = jnp.where(mine[:, None], jnp.einsum("tpr,pri->ti", v * factor, own_a), dx)
        uv = jnp.sum(u * v, axis=2)
        dweight = jnp.where(mine, jnp.sum(uv * scale[slot][None, :], axis=1), dweight)
        da = jnp.einsum("tpr,ti->pri", v * factor, own_x)
        db = jnp.einsum("tpr,tpo->ro", u * factor, g_parts)
        dscale = jnp.sum(uv * own_weight[:, None], axis=0)
        kept_rows = kept_b(
            Site(a, jnp.broadcast_to(db, b.shape), scale, rank, part_widths), slot
        )
        return (dx, dweight), (jnp.where(kept[:, :, None], da, 0), kept_rows, dscale)

    start = (jnp.zeros(x.shape, jnp.float32), jnp.zeros(x.shape[:1], jnp.float32))
    (dx, dweight), (da, db, dscale) = jax.lax.scan(
        one_slot, start, jnp.arange(a.shape[0])
    )
    return Gradients(
        dx.astype(x.dtype), da.astype(a.dtype), db.astype(b.dtype), dscale, dweight
    )
