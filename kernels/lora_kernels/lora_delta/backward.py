"""Gradients of `lora_delta`: same routing, sums over each slot's own rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lora_kernels.lora_delta.site import (
    Site,
    a_of_slot,
    b_of_slot,
    kept_rows,
    tokens_per_row,
    wide_dtype,
)
from lora_kernels.lora_delta.xla import loop_block
from lora_kernels.routing import Routing, max_work_items, work_list


class Gradients(NamedTuple):
    """Cotangents of the differentiable arguments, each in its argument's dtype."""

    x: Float[Array, "rows d_in"]
    a: Float[Array, "slots parts max_rank d_in"]
    b: Float[Array, "slots max_rank d_out"]
    scale: Float[Array, "slots parts"]
    weight: Float[Array, " tokens"]


class _Sums(NamedTuple):
    """What the loop carries: rows in sorted order (padded), and sums of each slot."""

    x: Float[Array, "padded d_in"]
    weight: Float[Array, " padded"]
    a: Float[Array, "slots parts max_rank d_in"]
    b: Float[Array, "slots max_rank d_out"]
    scale: Float[Array, "slots parts"]


def lora_delta_backward(
    x: Float[Array, "rows d_in"],
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

    With `u = x A^T` and `v = g B^T` of a row's own slot, both `(parts, rank)`, and
    `f = scale * weight`:

        dx = (f v) A            dA = sum over the slot's rows of (f v)^T x
        d weight = sum(scale u v)    dB = ... (f u)^T g    d scale = ... sum(weight u v)

    Rows of other slots are selected to 0 before a sum over rows meets them, and rank
    tails are selected to 0 after it: a NaN stays in its own row and its own slot.
    """
    if 0 in (*x.shape, *g.shape, a.shape[2]):
        return Gradients(*map(jnp.zeros_like, (x, a, b, scale, routing.weight)))
    site = Site(a, b, scale, rank, part_widths)
    tokens, slots = g.shape[0], a.shape[0]
    shared = tokens_per_row(x, routing)
    block = loop_block(tokens, slots)
    dtype = wide_dtype(x, g, a, b)
    work = work_list(routing.starts, max_work_items(tokens, slots, block), block)
    rows = jnp.pad(x[routing.order // shared].astype(dtype), ((0, block), (0, 0)))
    g_rows = jnp.pad(g[routing.order].astype(dtype), ((0, block), (0, 0)))
    weight = jnp.pad(routing.weight[routing.order], (0, block)).astype(dtype)

    def item(i: Int32[Array, ""], sums: _Sums) -> _Sums:
        slot, start, stop = work[0][i], work[1][i], work[2][i]
        mine = start + jnp.arange(block, dtype=jnp.int32) < stop

        def own(array: Array) -> Array:
            cut = jax.lax.dynamic_slice_in_dim(array, start, block)
            return jnp.where(mine.reshape(-1, *[1] * (cut.ndim - 1)), cut, 0)

        x_block, g_block, w_block = own(rows), own(g_rows), own(weight)
        kept = kept_rows(site, slot)[:, :, None]  # [p, r, 1]
        a_slot = jnp.where(kept, a_of_slot(site, slot, dtype), 0)
        b_slot = b_of_slot(site, slot, dtype)
        u = jnp.where(kept, jnp.einsum("pri,ti->prt", a_slot, x_block), 0)
        v = jnp.stack(
            [
                b_slot[part] @ g_block[:, first:stop].T
                for part, (first, stop) in enumerate(site.columns)
            ]
        )
        factor = (scale[slot][:, None] * w_block[None, :])[:, None, :]
        fu, fv = u * factor, jnp.where(kept, v * factor, 0)
        uv = jnp.sum(u * v, axis=1)  # [p, t]
        db = [
            jnp.where(kept[part], fu[part] @ g_block[:, first:stop], 0)
            for part, (first, stop) in enumerate(site.columns)
        ]
        da = jnp.where(kept, jnp.einsum("prt,ti->pri", fv, x_block), 0)
        dx = jnp.einsum("prt,pri->ti", fv, a_slot)
        dweight = jnp.sum(uv * scale[slot][:, None], axis=0)
        put = jax.lax.dynamic_update_slice_in_dim
        return _Sums(
            put(sums.x, dx, start, 0),
            put(sums.weight, dweight, start, 0),
            sums.a.at[slot].add(da),
            sums.b.at[slot].add(jnp.concatenate(db, axis=1)),
            sums.scale.at[slot].add(jnp.sum(uv * w_block[None, :], axis=1)),
        )

    zeros = _Sums(
        jnp.zeros_like(rows),
        jnp.zeros_like(weight),
        jnp.zeros(a.shape, dtype),
        jnp.zeros(b.shape, dtype),
        jnp.zeros(scale.shape, dtype),
    )
    sums = jax.lax.fori_loop(0, work[3], item, zeros)
    dx = sums.x[routing.position].reshape(x.shape[0], shared, x.shape[1])
    return Gradients(
        dx.sum(axis=1).astype(x.dtype),
        sums.a.astype(a.dtype),
        sums.b.astype(b.dtype),
        sums.scale.astype(scale.dtype),
        sums.weight[routing.position].astype(routing.weight.dtype),
    )
