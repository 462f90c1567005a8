"""The layouts in which XLA computes the low-rank update of a batch.

    loop      a loop over the work items that are in use; each meets one slot's A and B
              and `block` rows. Reads only active slots. CPU: at every size the form
              that needs the least time, see `bench`.
    gather    every row meets its own A and B, without sorting: two or three launches on
              a GPU, no temporaries, but the same A is read once a row. Decode.
    batched   all work items at once, in batched dense products over gathered copies of
              A and B. Prefill where a loop would wait for the host between its steps.

Each returns the update in order of the tokens, float32, garbage in base rows. None lets
a number of another slot, another row or a rank tail reach a row: rows of one product
are independent, and what a sum over the rank would meet is selected to 0 before.
"""

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
from lora_kernels.routing import Routing, max_work_items, work_list

WRITTEN_OUT_RANK = 64
"""Largest rank axis whose sum `gather` writes out term by term."""


def loop(
    x: Float[Array, "rows d_in"], site: Site, routing: Routing, *, block: int
) -> Float[Array, "tokens d_out"]:
    """Computes the update item by item; `block` rows each, a row's bits never vary.

    Rows are sorted by slot, and an item's rows are consecutive. The last item of a slot
    also computes rows of the next group with the wrong slot: the next item overwrites
    them. Base rows come first and are never written.
    """
    tokens, d_out = routing.slot.shape[0], site.b.shape[-1]
    slots, parts, max_rank, d_in = site.a.shape
    dtype = wide_dtype(x, site.a, site.b)
    items = max_work_items(tokens, slots, block)
    work_slot, work_start, _, work_count = work_list(routing.starts, items, block)
    row = routing.order // tokens_per_row(x, routing)
    rows = jnp.pad(x[row].astype(dtype), ((0, block), (0, 0)))
    weight = jnp.pad(routing.weight[routing.order], (0, block))

    def item(
        i: Int32[Array, ""], out: Float[Array, "padded d_out"]
    ) -> Float[Array, "padded d_out"]:
        slot, start = work_slot[i], work_start[i]
        x_block = jax.lax.dynamic_slice_in_dim(rows, start, block)
        a = a_of_slot(site, slot, dtype).reshape(parts * max_rank, d_in)
        # A is the left operand: XLA's CPU products are up to twice as fast that way.
        h = _dot(a, x_block, 1, 1).reshape(parts, max_rank, block)
        strength = jax.lax.dynamic_slice_in_dim(weight, start, block)
        h = h * (site.scale[slot][:, None] * strength[None, :])[:, None, :]
        h = jnp.where(kept_rows(site, slot)[:, :, None], h, 0).swapaxes(1, 2)
        b = b_of_slot(site, slot, dtype)
        delta = [_dot(h[part], b[part], 1, 0) for part in range(parts)]
        delta = jnp.concatenate(delta, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(out, delta, start, 0)

    zeros = jnp.zeros((tokens + block, d_out), dtype)
    return jax.lax.fori_loop(0, work_count, item, zeros)[routing.position]


def gather(
    x: Float[Array, "rows d_in"], site: Site, routing: Routing
) -> Float[Array, "tokens d_out"]:
    """Computes the update row by row from gathered A and B.

    The sum over the rank is written out, so that XLA fuses the gather of B, the masks,
    the sum and the later addition to y in one launch, without temporaries; a reduction
    would write the update first, and does where the rank is too large to write out.
    """
    dtype = wide_dtype(x, site.a, site.b)
    slot = jnp.maximum(routing.slot, 0)
    kept = jax.vmap(lambda s: kept_rows(site, s))(slot)  # [t, p, r]
    x = jnp.repeat(x, tokens_per_row(x, routing), axis=0)
    h = _einsum("ti,tpri->tpr", x, site.a[slot], dtype)
    h = h * (site.scale[slot] * routing.weight[:, None])[:, :, None]
    part = site.part_of_column
    max_rank = site.b.shape[1]
    if max_rank > WRITTEN_OUT_RANK:
        products = h.swapaxes(1, 2)[:, :, part] * site.b[slot].astype(dtype)
        kept_products = jnp.where(kept.swapaxes(1, 2)[:, :, part], products, 0)
        return jnp.sum(kept_products, axis=1)
    delta = jnp.zeros((), dtype)
    for r in range(max_rank):
        product = h[:, :, r][:, part] * site.b[slot, r].astype(dtype)
        delta = delta + jnp.where(kept[:, :, r][:, part], product, 0)
    return delta


def batched(
    x: Float[Array, "rows d_in"], site: Site, routing: Routing, *, block: int
) -> Float[Array, "tokens d_out"]:
    """Computes the update of all work items at once; unused items are computed too.

    The rank-sized intermediate is rounded to B's dtype: what tensor cores take.
    """
    tokens = routing.slot.shape[0]
    dtype = wide_dtype(x, site.a, site.b)
    items = max_work_items(tokens, site.a.shape[0], block)
    work_slot, work_start, _, _ = work_list(routing.starts, items, block)
    slot = jnp.maximum(work_slot, 0)
    offset = jnp.arange(block, dtype=jnp.int32)
    rows = routing.order[jnp.minimum(work_start[:, None] + offset[None, :], tokens - 1)]
    kept = jax.vmap(lambda s: kept_rows(site, s))(slot)  # [n, p, r]
    x_items = x[rows // tokens_per_row(x, routing)]
    h = _einsum("nbi,npri->npbr", x_items, site.a[slot], dtype)
    strength = site.scale[slot][:, :, None] * routing.weight[rows][:, None, :]
    h = jnp.where(kept[:, :, None, :], h * strength[..., None], 0).astype(site.b.dtype)
    item, place = item_of_row(routing, block)
    delta = [
        _einsum(
            "nbr,nro->nbo",
            h[:, part],
            jnp.where(kept[:, part, :, None], site.b[slot][:, :, first:stop], 0),
            dtype,
        )[item, place]
        for part, (first, stop) in enumerate(site.columns)
    ]
    return jnp.concatenate(delta, axis=1)


def item_of_row(
    routing: Routing, block: int
) -> tuple[Int32[Array, " tokens"], Int32[Array, " tokens"]]:
    """Returns each token's work item and its place there; of base rows, 0 and 0."""
    tiles = (routing.counts + (block - 1)) // block
    first_item = jnp.cumsum(tiles, dtype=jnp.int32) - tiles
    slot = jnp.maximum(routing.slot, 0)
    place = routing.position - routing.starts[slot + 1]
    adapted = routing.slot >= 0
    item = jnp.where(adapted, first_item[slot] + place // block, 0)
    return item, jnp.where(adapted, place % block, 0)


def _dot(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    axes = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=left.dtype)


def _einsum(equation: str, left: Array, right: Array, dtype: jnp.dtype) -> Array:
    # Both operands in one dtype, as products of mixed dtypes are slow or absent.
    common = jnp.promote_types(left.dtype, right.dtype)
    return jnp.einsum(
        equation,
        left.astype(common),
        right.astype(common),
        preferred_element_type=dtype,
    )
