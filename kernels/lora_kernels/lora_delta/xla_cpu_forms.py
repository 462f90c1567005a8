"""The layouts in which XLA computes the low-rank update of a batch on a CPU.

    loop   a loop over the work items that are in use; each meets one slot's A and B and
           `block` rows, and adds into them. Reads only active slots, and of them only
           ranks in use.
    flat   one product of x with A of all slots, of which each row keeps its own slot's,
           then B row by row. Decode over few slots: a step of a loop costs more than
           the products of the other slots.
    few    A copied for each row, then B row by row. A handful of rows, or decode over
           many slots.

The last two write their sum over the rank out, for small ranks alone: a term more takes
longer to compile, and a row pays for all of them.

What each promises is what `xla_forms` says of all.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from lora_kernels.floats import as_bits, from_bits, wide_dtype
from lora_kernels.lora_delta.site import Site, tokens_per_row
from lora_kernels.routing import Routing, max_work_items, work_list

LOOP_RANKS = (16, 32)
"""Most ranks of A and B in one product of `loop`, where an item has up to 16 rows and
where it has more: a slot costs its own largest rank, rounded up to this."""

BLOCK = 16
"""Most rows that `flat` and `few` expand together: enough for all cores to share."""


def loop(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    site: Site,
    routing: Routing,
    *,
    block: int,
) -> Float[Array, "tokens d_out"]:
    """Adds the update item by item; `block` rows each, a row's bits never vary.

    An item takes its rows out of x and y and puts the sums back: y is written in place,
    and nothing of its size is made. The rows that fill up the last item of a slot
    belong to other items; they are computed with it and not put back.
    """
    tokens, slots = routing.slot.shape[0], site.a.shape[0]
    dtype = wide_dtype(x, site.a, site.b)
    items = max_work_items(tokens, slots, block)
    work_slot, start, stop, count = work_list(routing.starts, items, block)
    order = jnp.pad(routing.order, (0, block))
    shared = tokens_per_row(x, routing)
    ranks = min(site.a.shape[2], LOOP_RANKS[block > 16])
    rows = x.astype(dtype)

    def item(
        i: Int32[Array, ""], out: Float[Array, "tokens d_out"]
    ) -> Float[Array, "tokens d_out"]:
        slot = work_slot[i]
        token = jax.lax.dynamic_slice_in_dim(order, start[i], block)
        x_block = rows[token // shared]
        strength = site.scale[slot][:, None] * routing.weight[token][None, :]

        def some_ranks(
            k: Int32[Array, ""], total: Float[Array, "block d_out"]
        ) -> Float[Array, "block d_out"]:
            return total + _update(x_block, site, slot, k * ranks, ranks, strength)

        total = out[token]
        blocks = (jnp.max(site.rank[slot]) + ranks - 1) // ranks
        total = jax.lax.fori_loop(0, blocks, some_ranks, total)
        return _put(out, total, token, stop[i] - start[i])

    total = jax.lax.fori_loop(0, count, item, y.astype(dtype))
    return _narrowed(total, y, routing)


def _update(
    x: Float[Array, "block d_in"],
    site: Site,
    slot: Int32[Array, ""],
    first: Int32[Array, ""],
    ranks: int,
    strength: Float[Array, "parts block"],
) -> Float[Array, "block d_out"]:
    """Returns what `ranks` ranks of one slot, from `first` on, add to rows of x.

    At the end of a rank axis that `ranks` does not divide, the slice of A and B begins
    earlier; the ranks before `first` count as 0.
    """
    parts, max_rank, d_in = site.a.shape[1:]
    begin = jnp.minimum(first, max_rank - ranks)
    rank = begin + jnp.arange(ranks, dtype=jnp.int32)
    kept = (rank >= first)[None, :] & (rank[None, :] < site.rank[slot][:, None])
    shape = (1, parts, ranks, d_in)
    a = jax.lax.dynamic_slice(as_bits(site.a), (slot, 0, begin, 0), shape)
    # A is the left operand: XLA's CPU products are up to twice as fast that way.
    h = _dot(from_bits(a, site.a, x.dtype).reshape(parts * ranks, d_in), x, 1, 1)
    h = h.reshape(parts, ranks, -1) * strength[:, None, :]
    h = jnp.where(kept[:, :, None], h, 0).swapaxes(1, 2)
    delta = []
    for part, (left, right) in enumerate(site.columns):
        shape = (1, ranks, right - left)
        b = jax.lax.dynamic_slice(as_bits(site.b), (slot, begin, left), shape)[0]
        b = jnp.where(kept[part][:, None], from_bits(b, site.b, x.dtype), 0)
        delta.append(_dot(h[part], b, 1, 0))
    return jnp.concatenate(delta, axis=1)


def _put(
    out: Float[Array, "tokens d_out"],
    total: Float[Array, "block d_out"],
    token: Int32[Array, " block"],
    count: Int32[Array, ""],
) -> Float[Array, "tokens d_out"]:
    """Writes the first `count` rows of a block in place, each to its token."""
    mine = jnp.arange(len(token), dtype=jnp.int32) < count
    return out.at[jnp.where(mine, token, len(out))].set(total, mode="drop")


def _narrowed(
    total: Float[Array, "tokens d_out"],
    y: Float[Array, "tokens d_out"],
    routing: Routing,
) -> Float[Array, "tokens d_out"]:
    """Returns the sums in y's dtype, and base rows of y as they are."""
    if total.dtype == y.dtype:
        return total
    return jnp.where((routing.slot >= 0)[:, None], total.astype(y.dtype), y)


def flat(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    site: Site,
    routing: Routing,
) -> Float[Array, "tokens d_out"]:
    """Adds the update from one product with A of all slots, then row by row."""
    slots, parts, max_rank, d_in = site.a.shape
    dtype = wide_dtype(x, site.a, site.b)
    a = site.a.reshape(slots * parts * max_rank, d_in)
    # A is the left operand, as in `loop`.
    h = _dot(a.astype(dtype), x.astype(dtype), 1, 1)
    h = h.reshape(slots, parts, max_rank, x.shape[0])
    return _row_by_row(lambda row, slot: h[slot, :, :, row], x, y, site, routing)


def few(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    site: Site,
    routing: Routing,
) -> Float[Array, "tokens d_out"]:
    """Adds the update row by row, from each row's own copy of A and B as it lies."""
    dtype = wide_dtype(x, site.a, site.b)
    rows = x.astype(dtype)

    def own(
        row: Int32[Array, " block"], slot: Int32[Array, " block"]
    ) -> Float[Array, "block parts max_rank"]:
        a = as_bits(site.a).at[slot].get(mode="promise_in_bounds")
        axes = (((3,), (1,)), ((0,), (0,)))
        return jax.lax.dot_general(from_bits(a, site.a, dtype), rows[row], axes)

    return _row_by_row(own, x, y, site, routing)


def _row_by_row(
    own: Callable[[Array, Array], Float[Array, "block parts max_rank"]],
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    site: Site,
    routing: Routing,
) -> Float[Array, "tokens d_out"]:
    """Adds `h B` of each row's slot; `own(row of x, slot)` gives h of some tokens.

    The adapted rows come last in order, so a loop over blocks of them leaves out base
    rows. It is also what keeps the sum out of the fusions that read y: XLA would
    compute it again in each.
    """
    dtype = wide_dtype(x, site.a, site.b)
    tokens, shared = routing.slot.shape[0], tokens_per_row(x, routing)
    block, first = min(tokens, BLOCK), routing.starts[1]
    order = jnp.pad(routing.order, (0, block))

    def item(
        i: Int32[Array, ""], out: Float[Array, "tokens d_out"]
    ) -> Float[Array, "tokens d_out"]:
        start = first + i * block
        token = jax.lax.dynamic_slice_in_dim(order, start, block)
        slot = jnp.maximum(routing.slot[token], 0)
        strength = site.scale[slot] * routing.weight[token][:, None]
        h = own(token // shared, slot) * strength[:, :, None]
        total = out[token] + _expand(h, site, slot)
        return _put(out, total, token, tokens - start)

    blocks = (tokens - first + block - 1) // block
    total = jax.lax.fori_loop(0, blocks, item, y.astype(dtype))
    return _narrowed(total, y, routing)


def _expand(
    h: Float[Array, "rows parts max_rank"], site: Site, slot: Int32[Array, " rows"]
) -> Float[Array, "rows d_out"]:
    """Returns `h B` of each row's slot.

    The sum over the rank is written out, which XLA fuses with the gather of B and cuts
    over the cores. Parts are seen as pieces of one width, so that all are one fusion.
    """
    piece = math.gcd(*site.part_widths)
    owner = np.repeat(np.arange(h.shape[1]), np.asarray(site.part_widths) // piece)
    rank = site.rank[slot][:, owner, None]  # [t, pieces, 1]
    h = h[:, owner]
    b = as_bits(site.b).reshape(*site.b.shape[:2], len(owner), piece)
    row = slot.astype(jnp.uint32)  # what is unsigned needs no care for negative ones
    total = jnp.zeros((len(slot), len(owner), piece), h.dtype)
    for r in range(site.b.shape[1]):
        b_row = b.at[row, np.uint32(r)].get(mode="promise_in_bounds")
        product = h[:, :, r, None] * from_bits(b_row, site.b, h.dtype)
        total = total + jnp.where(r < rank, product, 0)
    return total.reshape(len(slot), -1)


def _dot(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    axes = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=left.dtype)
