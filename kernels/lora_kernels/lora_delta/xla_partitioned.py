"""`lora_delta` in plain jnp for slots that are cut over devices (GSPMD).

XLA's partitioner cuts a computation where its arrays are cut, as long as no operation
takes some columns of an axis that is: it would gather the whole axis on every device.
So nothing here slices a column: of a fused layer each part's product is made over all
columns and kept where they are the part's. Only rank-sized intermediates then cross
between devices, where A is cut along its inputs or its rank.

Knows no mesh, and is right on one device too, but slower there than `xla`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lora_kernels.floats import precision_of, wide_dtype
from lora_kernels.lora_delta import xla_forms
from lora_kernels.lora_delta.site import Site, kept_rows, tokens_per_row
from lora_kernels.lora_delta.xla import GATHER_TOKENS, batched_block
from lora_kernels.routing import Routing, max_work_items, work_list


def lora_delta(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    a: Float[Array, "slots parts max_rank d_in"],
    b: Float[Array, "slots max_rank d_out"],
    *,
    scale: Float[Array, "slots parts"],
    rank: Int32[Array, "slots parts"],
    routing: Routing,
    part_widths: tuple[int, ...],
) -> Float[Array, "tokens d_out"]:
    """Returns `y` plus each token's low-rank update; see `api.lora_delta`."""
    if 0 in (*x.shape, *y.shape, a.shape[2]):
        return y
    site, tokens = Site(a, b, scale, rank, part_widths), routing.slot.shape[0]
    if tokens <= GATHER_TOKENS:
        return xla_forms.gather(x, y, site, routing)
    return batched(x, y, site, routing, block=batched_block(tokens, a.shape[0]))


def batched(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    site: Site,
    routing: Routing,
    *,
    block: int,
) -> Float[Array, "tokens d_out"]:
    """Adds the update of all work items at once, as `xla_forms.batched`."""
    tokens = routing.slot.shape[0]
    dtype = wide_dtype(x, site.a, site.b)
    items = max_work_items(tokens, site.a.shape[0], block)
    work_slot, work_start, _, _ = work_list(routing.starts, items, block)
    slot = jnp.maximum(work_slot, 0)
    offset = jnp.arange(block, dtype=jnp.int32)
    rows = routing.order[jnp.minimum(work_start[:, None] + offset[None, :], tokens - 1)]
    kept = jax.vmap(lambda s: kept_rows(site, s))(slot)  # [n, p, r]
    x_items = x[rows // tokens_per_row(x, routing)].astype(dtype)
    h = jnp.einsum(
        "nbi,npri->npbr",
        x_items,
        site.a[slot].astype(dtype),
        precision=precision_of(x, site.a),
    )
    strength = site.scale[slot][:, :, None] * routing.weight[rows][:, None, :]
    h = jnp.where(kept[:, :, None, :], h * strength[..., None], 0)
    b = site.b[slot].astype(dtype)
    delta = jnp.zeros((items, block, b.shape[-1]), dtype)
    for part in range(len(site.part_widths)):
        own = jnp.where(kept[:, part, :, None], b, 0)
        product = jnp.einsum(
            "nbr,nro->nbo", h[:, part], own, precision=precision_of(x, site.b)
        )
        is_part = jnp.asarray(site.part_of_column == part)
        delta = jnp.where(is_part[None, None, :], product, delta)
    item, place = xla_forms.item_of_row(routing, block)
    return xla_forms.added(y, delta[item, place], routing)
