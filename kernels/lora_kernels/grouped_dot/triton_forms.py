"""Arrays and tiles -> the launches of the Triton kernels. Computes nothing itself."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lora_kernels.grouped_dot import tiles
from lora_kernels.grouped_dot.triton_kernels import gradient_kernel, product_kernel
from lora_kernels.routing import Routing, max_work_items, work_list
from lora_kernels.triton_launch import Launch


def product_launch(
    x: Float[Array, "rows d"],
    kernel: Float[Array, "groups d_in d_out"],
    pairs: Routing,
    *,
    transposed: bool,
    dtype: jnp.dtype,
) -> Launch:
    """Returns the launch of `x @ kernel`, or of `x @ kernel.T`, pair by pair.

    Its output is `(pairs, d_out)`, or `(pairs, d_in)`, in `dtype`; pairs without a
    group are zeros.
    """
    count, (groups, d_in, d_out) = pairs.slot.shape[0], kernel.shape
    summed, width = (d_out, d_in) if transposed else (d_in, d_out)
    chosen = tiles.product_tiles(
        pairs=count,
        groups=groups,
        summed=summed,
        width=width,
        number_bytes=number_bytes(x, kernel),
    )
    items = row_tiles(pairs, chosen.block_rows)
    return Launch(
        kernel=product_kernel,
        inputs=(x, kernel, pairs.order, *items),
        outputs=(jax.ShapeDtypeStruct((count, width), dtype),),
        aliases={},
        grid=(-(-width // chosen.block_n), items[0].shape[0]),
        constants={
            "PER_ROW": count // x.shape[0],
            "K": summed,
            "N": width,
            "W_K_STRIDE": 1 if transposed else d_out,
            "W_N_STRIDE": d_out if transposed else 1,
            "BLOCK_ROWS": chosen.block_rows,
            "BLOCK_K": chosen.block_k,
            "BLOCK_N": chosen.block_n,
            "EVEN": chosen.even,
            "STAGES": chosen.stages,
        },
        warps=chosen.warps,
        stages=chosen.stages,
    )


def gradient_launch(
    x: Float[Array, "rows d_in"],
    g: Float[Array, "pairs d_out"],
    kernel: Float[Array, "groups d_in d_out"],
    pairs: Routing,
) -> Launch:
    """Returns the launch of the kernels' gradient, in their shape and dtype."""
    groups, d_in, d_out = kernel.shape
    chosen = tiles.gradient_tiles(
        d_in=d_in, d_out=d_out, number_bytes=number_bytes(x, g)
    )
    return Launch(
        kernel=gradient_kernel,
        inputs=(x, g, pairs.order, pairs.starts),
        outputs=(jax.ShapeDtypeStruct(kernel.shape, kernel.dtype),),
        aliases={},
        grid=(-(-d_out // chosen.block_out), -(-d_in // chosen.block_in), groups),
        constants={
            "PER_ROW": pairs.slot.shape[0] // x.shape[0],
            "D_IN": d_in,
            "D_OUT": d_out,
            "BLOCK_IN": chosen.block_in,
            "BLOCK_OUT": chosen.block_out,
            "BLOCK_ROWS": chosen.block_rows,
            "STAGES": chosen.stages,
        },
        warps=chosen.warps,
        stages=chosen.stages,
    )


def row_tiles(pairs: Routing, block: int) -> tuple[Array, ...]:
    """Returns a work list whose group 0 holds the pairs without a group."""
    groups = pairs.num_slots + 1
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), pairs.starts])
    return work_list(starts, max_work_items(pairs.slot.shape[0], groups, block), block)


def number_bytes(left: Array, right: Array) -> int:
    """Returns the bytes of a number in a product: 2 if both are of one 16-bit dtype."""
    return left.dtype.itemsize if left.dtype == right.dtype else 4
