"""The layouts in which XLA computes the low-rank update of a batch.

    gather    every row meets its own A and B, without sorting: two or three launches on
              a GPU, no temporaries, but the same A is read once a row. Decode.
    batched   all work items at once, in batched dense products over gathered copies of
              A and B. Prefill where a loop would wait for the host between its steps.

Those for a CPU are in `xla_cpu_forms`. Each returns y plus the update, in order of the
tokens, base rows untouched. None lets a number of another slot, another row or a rank
tail reach a row: rows of one product are independent, and what a sum over the rank
would meet is selected to 0 before.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lora_kernels.floats import precision_of, wide_dtype
from lora_kernels.lora_delta.site import Site, kept_rows, tokens_per_row
from lora_kernels.routing import Routing, max_work_items, work_list

WRITTEN_OUT_RANK = 64
"""Largest rank axis whose sum over B is written out term by term."""


def gather(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    site: Site,
    routing: Routing,
) -> Float[Array, "tokens d_out"]:
    """Adds the update row by row from gathered A and B."""
    dtype = wide_dtype(x, site.a, site.b)
    x = jnp.repeat(x, tokens_per_row(x, routing), axis=0)
    h = _einsum("ti,tpri->tpr", x, site.a[jnp.maximum(routing.slot, 0)], dtype)
    return added(y, _expand(h, site, routing), routing)


def added(
    y: Float[Array, "tokens d_out"],
    delta: Float[Array, "tokens d_out"],
    routing: Routing,
) -> Float[Array, "tokens d_out"]:
    """Returns y plus the update, summed in its dtype; base rows as they are."""
    total = (y.astype(delta.dtype) + delta).astype(y.dtype)
    return jnp.where((routing.slot >= 0)[:, None], total, y)


def _expand(
    h: Float[Array, "tokens parts max_rank"], site: Site, routing: Routing
) -> Float[Array, "tokens d_out"]:
    """Returns the update of each row from `h = x A^T` of its slot; 0 in rank tails.

    The sum over the rank is written out, so that XLA fuses the gather of B, the masks,
    the sum and the addition to y in one pass (on a GPU one launch), without
    temporaries; a reduction would write the update first, and does where the rank is
    too large to write out.
    """
    slot = jnp.maximum(routing.slot, 0)
    kept = jax.vmap(lambda s: kept_rows(site, s))(slot)  # [t, p, r]
    h = h * (site.scale[slot] * routing.weight[:, None])[:, :, None]
    part = site.part_of_column
    max_rank = site.b.shape[1]
    if max_rank > WRITTEN_OUT_RANK:
        products = h.swapaxes(1, 2)[:, :, part] * site.b[slot].astype(h.dtype)
        kept_products = jnp.where(kept.swapaxes(1, 2)[:, :, part], products, 0)
        return jnp.sum(kept_products, axis=1)
    delta = jnp.zeros((), h.dtype)
    for r in range(max_rank):
        product = h[:, :, r][:, part] * site.b[slot, r].astype(h.dtype)
        delta = delta + jnp.where(kept[:, :, r][:, part], product, 0)
    return delta


def batched(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    site: Site,
    routing: Routing,
    *,
    block: int,
) -> Float[Array, "tokens d_out"]:
    """Adds the update of all work items at once; unused items are computed too.

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
    return added(y, jnp.concatenate(delta, axis=1), routing)


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


def _einsum(equation: str, left: Array, right: Array, dtype: jnp.dtype) -> Array:
    # Both operands in one dtype, as products of mixed dtypes are slow or absent.
    common = jnp.promote_types(left.dtype, right.dtype)
    return jnp.einsum(
        equation,
        left.astype(common),
        right.astype(common),
        precision=precision_of(left, right),
        preferred_element_type=dtype,
    )
