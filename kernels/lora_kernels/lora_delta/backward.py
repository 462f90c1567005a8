"""Gradients of `lora_delta`: same routing, sums over each slot's own rows."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lora_kernels.floats import as_bits, from_bits, precision_of, wide_dtype
from lora_kernels.lora_delta.site import Site, tokens_per_row
from lora_kernels.lora_delta.xla import loop_block
from lora_kernels.routing import Routing, max_work_items, work_list

RANK_BLOCK = 32
"""Ranks of one step: a slot costs its own largest rank, rounded up to this."""


class Gradients(NamedTuple):
    """Cotangents of the differentiable arguments, each in its argument's dtype."""

    x: Float[Array, "rows d_in"]
    a: Float[Array, "slots parts max_rank d_in"]
    b: Float[Array, "slots max_rank d_out"]
    scale: Float[Array, "slots parts"]
    weight: Float[Array, " tokens"]


class _Rows(NamedTuple):
    """The rows of one work item, zeros where they are not its own."""

    x: Float[Array, "block d_in"]
    g: Float[Array, "block d_out"]
    weight: Float[Array, " block"]


class _OfRows(NamedTuple):
    """Sums of each row: of one work item, or of all in sorted order (padded)."""

    x: Float[Array, "rows d_in"]
    weight: Float[Array, " rows"]


class _OfSlots(NamedTuple):
    """Sums of each slot."""

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
    tails are selected to 0 after it: a NaN stays in its own row and its own slot, and
    the scale of an absent part is never met.
    """
    if 0 in (*x.shape, *g.shape, a.shape[2]):
        return Gradients(*map(jnp.zeros_like, (x, a, b, scale, routing.weight)))
    site = Site(a, b, scale, rank, part_widths)
    tokens, slots = g.shape[0], a.shape[0]
    shared = tokens_per_row(x, routing)
    block = loop_block(tokens, slots)
    dtype = wide_dtype(x, g, a, b)
    add_ranks = functools.partial(_add_ranks, site, precision_of(x, g, a, b))
    work = work_list(routing.starts, max_work_items(tokens, slots, block), block)
    x_rows = jnp.pad(x[routing.order // shared].astype(dtype), ((0, block), (0, 0)))
    g_rows = jnp.pad(g[routing.order].astype(dtype), ((0, block), (0, 0)))
    weight = jnp.pad(routing.weight[routing.order], (0, block)).astype(dtype)

    def item(
        i: Int32[Array, ""], sums: tuple[_OfRows, _OfSlots]
    ) -> tuple[_OfRows, _OfSlots]:
        slot, start, stop = work[0][i], work[1][i], work[2][i]
        mine = start + jnp.arange(block, dtype=jnp.int32) < stop

        def own(array: Array) -> Array:
            cut = jax.lax.dynamic_slice_in_dim(array, start, block)
            return jnp.where(mine.reshape(-1, *[1] * (cut.ndim - 1)), cut, 0)

        rows = _Rows(own(x_rows), own(g_rows), own(weight))
        steps = (jnp.max(rank[slot]) + (RANK_BLOCK - 1)) // RANK_BLOCK
        done, of_slots = jax.lax.fori_loop(
            0,
            steps,
            functools.partial(add_ranks, slot, rows),
            (_OfRows(jnp.zeros_like(rows.x), jnp.zeros_like(rows.weight)), sums[1]),
        )
        put = jax.lax.dynamic_update_slice_in_dim
        of_rows = [
            put(all_, one, start, 0) for all_, one in zip(sums[0], done, strict=True)
        ]
        return _OfRows(*of_rows), of_slots

    of_rows = _OfRows(jnp.zeros_like(x_rows), jnp.zeros_like(weight))
    of_slots = _OfSlots(*(jnp.zeros(array.shape, dtype) for array in (a, b, scale)))
    of_rows, of_slots = jax.lax.fori_loop(0, work[3], item, (of_rows, of_slots))
    dx = of_rows.x[routing.position].reshape(x.shape[0], shared, x.shape[1])
    return Gradients(
        dx.sum(axis=1).astype(x.dtype),
        of_slots.a.astype(a.dtype),
        of_slots.b.astype(b.dtype),
        of_slots.scale.astype(scale.dtype),
        of_rows.weight[routing.position].astype(routing.weight.dtype),
    )


def _add_ranks(
    site: Site,
    precision: jax.lax.Precision,
    slot: Int32[Array, ""],
    rows: _Rows,
    step: Int32[Array, ""],
    sums: tuple[_OfRows, _OfSlots],
) -> tuple[_OfRows, _OfSlots]:
    """Adds what one block of ranks of one slot adds to its rows and to the slot."""
    of_rows, of_slots = sums
    _, parts, max_rank, d_in = site.a.shape
    d_out, dtype = site.b.shape[2], rows.x.dtype
    size = min(RANK_BLOCK, max_rank)
    einsum = functools.partial(jnp.einsum, precision=precision)
    # The last block starts early enough to be whole, and leaves out what is done.
    start = jnp.minimum(step * size, max_rank - size)
    r = start + jnp.arange(size, dtype=jnp.int32)
    rank, scale = site.rank[slot], site.scale[slot]
    kept = ((r >= step * size)[None, :] & (r[None, :] < rank[:, None]))[:, :, None]
    at_a, at_b = (slot, 0, start, 0), (slot, start, 0)
    a = jax.lax.dynamic_slice(as_bits(site.a), at_a, (1, parts, size, d_in))[0]
    b = jax.lax.dynamic_slice(as_bits(site.b), at_b, (1, size, d_out))[0]
    a = jnp.where(kept, from_bits(a, site.a, dtype), 0)
    b = from_bits(b, site.b, dtype)
    g = [rows.g[:, first:stop] for first, stop in site.columns]
    b_parts = [
        jnp.where(kept[part], b[:, first:stop], 0)
        for part, (first, stop) in enumerate(site.columns)
    ]
    u = jnp.where(kept, einsum("pri,ti->prt", a, rows.x), 0)
    v = jnp.stack([einsum("ro,to->rt", *pair) for pair in zip(b_parts, g, strict=True)])
    factor = (scale[:, None] * rows.weight[None, :])[:, None, :]
    fu, fv = u * factor, jnp.where(kept, v * factor, 0)
    uv = jnp.sum(jnp.where(kept, u * v, 0), axis=1)  # [p, t]
    present = (rank > 0)[:, None]
    dweight = jnp.where(present, uv * scale[:, None], 0)
    dscale = jnp.where(present, uv * rows.weight[None, :], 0)
    da = jnp.where(kept, einsum("prt,ti->pri", fv, rows.x), 0)
    db = [
        jnp.where(kept[part], einsum("rt,to->ro", fu[part], g[part]), 0)
        for part in range(parts)
    ]
    return _OfRows(
        of_rows.x + einsum("prt,pri->ti", fv, a),
        of_rows.weight + jnp.sum(dweight, axis=0),
    ), _OfSlots(
        _added_at(of_slots.a, da, at_a),
        _added_at(of_slots.b, jnp.concatenate(db, axis=1), at_b),
        of_slots.scale.at[slot].add(jnp.sum(dscale, axis=1)),
    )


def _added_at(
    total: Array,
    one: Array,
    start: tuple[Int32[Array, ""] | int, ...],
) -> Array:
    """Returns a sum of each slot, `(slots, ...)`, with one slot's block added."""
    old = jax.lax.dynamic_slice(total, start, (1, *one.shape))
    return jax.lax.dynamic_update_slice(total, old + one[None], start)
