"""The layouts in which XLA computes grouped products.

    loop      a loop over the work items that are in use; each meets one group's kernel
              and `block` rows. The kernel is taken in tiles of whole rows that stay in
              a core's cache, since XLA copies what it slices. Reads only kernels that
              have pairs.
    batched   work items in batched dense products over gathered copies of kernels,
              several items at once, up to `GATHERED_BYTES` of copies: for accelerators,
              where a loop over single items would leave most of the device idle.

Both exist as a product with the kernel and with its transpose. They return the wide
dtype, in order of the pairs, and zeros where the group is -1. Rows of one product are
independent, so no number of another group or another row reaches a pair.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lora_kernels.floats import as_bits, from_bits, precision_of, wide_dtype
from lora_kernels.grouped_dot.shapes import Kernel
from lora_kernels.routing import Routing, max_work_items, work_list

TILE_BYTES = 1 << 21
"""Bytes of a kernel that one step of `loop` copies: what fits a core's L2 cache."""

GATHERED_BYTES = 256 << 20
"""Bytes of copied kernels that one step of `batched` may hold."""


def rows_in_order(
    x: Float[Array, "rows d"], pairs: Routing, block: int
) -> Float[Array, "padded d"]:
    """Returns each pair's row of x, sorted by group, and `block` rows of zeros."""
    per_row = pairs.slot.shape[0] // x.shape[0]
    return jnp.pad(x[pairs.order // per_row], ((0, block), (0, 0)))


def loop(
    x: Float[Array, "rows d_in"],
    kernel: Kernel,
    pairs: Routing,
    *,
    block: int,
) -> Float[Array, "pairs d_out"]:
    """Computes `x @ kernel` item by item, summing over tiles of the kernel's rows."""
    _, d_in, d_out = kernel.shape
    dtype = wide_dtype(x, kernel)
    dot = functools.partial(_dot, precision=precision_of(x, kernel))
    tile = _tile_rows(kernel, dtype)
    bits = as_bits(kernel)

    def product(
        rows: Float[Array, "block d_in"], group: Int32[Array, ""]
    ) -> Float[Array, "block d_out"]:
        def add(
            first: Int32[Array, ""] | int, total: Float[Array, "block d_out"], size: int
        ) -> Float[Array, "block d_out"]:
            part = jax.lax.dynamic_slice_in_dim(rows, first, size, 1)
            own = jax.lax.dynamic_slice(bits, (group, first, 0), (1, size, d_out))[0]
            return total + dot(part, from_bits(own, kernel, dtype), 1, 0)

        zeros = jnp.zeros((block, d_out), dtype)
        return _over_tiles(d_in, tile, add, zeros)

    return _over_items(x, pairs, product, d_out, dtype, block)


def loop_transposed(
    g: Float[Array, "rows d_out"],
    kernel: Kernel,
    pairs: Routing,
    *,
    block: int,
) -> Float[Array, "pairs d_in"]:
    """Computes `g @ kernel.T` item by item, one tile of the kernel's rows a step."""
    _, d_in, d_out = kernel.shape
    dtype = wide_dtype(g, kernel)
    dot = functools.partial(_dot, precision=precision_of(g, kernel))
    tile = _tile_rows(kernel, dtype)
    bits = as_bits(kernel)

    def product(
        rows: Float[Array, "block d_out"], group: Int32[Array, ""]
    ) -> Float[Array, "block d_in"]:
        def put(
            first: Int32[Array, ""] | int, out: Float[Array, "block d_in"], size: int
        ) -> Float[Array, "block d_in"]:
            own = jax.lax.dynamic_slice(bits, (group, first, 0), (1, size, d_out))[0]
            columns = dot(rows, from_bits(own, kernel, dtype), 1, 1)
            return jax.lax.dynamic_update_slice_in_dim(out, columns, first, 1)

        zeros = jnp.zeros((block, d_in), dtype)
        return _over_tiles(d_in, tile, put, zeros)

    return _over_items(g, pairs, product, d_in, dtype, block)


def _over_items(
    x: Float[Array, "rows d"],
    pairs: Routing,
    product: Callable[[Array, Array], Array],
    width: int,
    dtype: jnp.dtype,
    block: int,
) -> Float[Array, "pairs {width}"]:
    # The last item of a group also computes rows of the next group, with the wrong
    # kernel: the next item overwrites them. Base rows come first and stay zeros.
    count = pairs.slot.shape[0]
    items = max_work_items(count, pairs.num_slots, block)
    work_slot, work_start, _, work_count = work_list(pairs.starts, items, block)
    rows = rows_in_order(x, pairs, block).astype(dtype)

    def item(i: Int32[Array, ""], out: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(rows, work_start[i], block)
        done = product(own, work_slot[i])
        return jax.lax.dynamic_update_slice_in_dim(out, done, work_start[i], 0)

    zeros = jnp.zeros((count + block, width), dtype)
    return jax.lax.fori_loop(0, work_count, item, zeros)[pairs.position]


def _over_tiles(
    length: int,
    tile: int,
    step: Callable[[Array | int, Array, int], Array],
    carried: Array,
) -> Array:
    """Runs `step(first, carried, size)` over an axis cut into tiles and a rest."""
    whole = length // tile
    carried = jax.lax.fori_loop(0, whole, lambda i, c: step(i * tile, c, tile), carried)
    rest = length - whole * tile
    return step(whole * tile, carried, rest) if rest else carried


def _tile_rows(kernel: Array, dtype: jnp.dtype) -> int:
    row_bytes = kernel.shape[2] * jnp.dtype(dtype).itemsize
    return max(min(TILE_BYTES // row_bytes, kernel.shape[1]), 1)


def batched(
    x: Float[Array, "rows d_in"],
    kernel: Kernel,
    pairs: Routing,
    *,
    block: int,
) -> Float[Array, "pairs d_out"]:
    """Computes `x @ kernel` of several items at once; unused items are computed too."""
    return _batched("nbi,nio->nbo", x, kernel, pairs, block)


def batched_transposed(
    g: Float[Array, "rows d_out"],
    kernel: Kernel,
    pairs: Routing,
    *,
    block: int,
) -> Float[Array, "pairs d_in"]:
    """Computes `g @ kernel.T` of several items at once."""
    return _batched("nbo,nio->nbi", g, kernel, pairs, block)


def _batched(
    equation: str, x: Array, kernel: Array, pairs: Routing, block: int
) -> Float[Array, "pairs width"]:
    count = pairs.slot.shape[0]
    per_row = count // x.shape[0]
    items = max_work_items(count, pairs.num_slots, block)
    work_slot, work_start, _, _ = work_list(pairs.starts, items, block)
    offset = jnp.arange(block, dtype=jnp.int32)
    position = jnp.minimum(work_start[:, None] + offset[None, :], count - 1)
    rows = pairs.order[position] // per_row
    common = jnp.result_type(x, kernel)

    def item(work: tuple[Array, Array]) -> Array:
        group, own_rows = work
        # A batch of one, which lax.map turns into a batch of several.
        return jnp.einsum(
            equation,
            x[own_rows][None].astype(common),
            kernel[group][None].astype(common),
            precision=precision_of(x, kernel),
            preferred_element_type=wide_dtype(x, kernel),
        )[0]

    together = GATHERED_BYTES // (kernel[0].size * common.itemsize)
    out = jax.lax.map(
        item,
        (jnp.maximum(work_slot, 0), rows),
        batch_size=max(min(together, items), 1),
    )
    item_of_pair, place = _item_of_pair(pairs, block)
    return jnp.where((pairs.slot >= 0)[:, None], out[item_of_pair, place], 0)


def _item_of_pair(
    pairs: Routing, block: int
) -> tuple[Int32[Array, " pairs"], Int32[Array, " pairs"]]:
    """Returns each pair's work item and its place there; of base rows, 0 and 0."""
    tiles = (pairs.counts + (block - 1)) // block
    first_item = jnp.cumsum(tiles, dtype=jnp.int32) - tiles
    group = jnp.maximum(pairs.slot, 0)
    place = pairs.position - pairs.starts[group + 1]
    used = pairs.slot >= 0
    item = jnp.where(used, first_item[group] + place // block, 0)
    return item, jnp.where(used, place % block, 0)


def _dot(
    left: Array,
    right: Array,
    left_axis: int,
    right_axis: int,
    precision: jax.lax.Precision,
) -> Array:
    axes = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(
        left, right, axes, precision, preferred_element_type=left.dtype
    )
