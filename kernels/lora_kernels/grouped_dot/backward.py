"""Gradients of `grouped_dot`: same routing, sums over each group's own pairs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lora_kernels.floats import precision_of, wide_dtype
from lora_kernels.grouped_dot import xla_forms
from lora_kernels.grouped_dot.xla import batched_block, loop_block
from lora_kernels.routing import Routing, max_work_items, work_list


class Gradients(NamedTuple):
    """Cotangents of the differentiable arguments, each in its argument's dtype."""

    x: Float[Array, "rows d_in"]
    kernel: Float[Array, "groups d_in d_out"]


def grouped_dot_backward(
    x: Float[Array, "rows d_in"],
    g: Float[Array, "pairs d_out"],
    kernel: Float[Array, "groups d_in d_out"],
    pairs: Routing,
) -> Gradients:
    """Returns the cotangents of x and kernel for the cotangent `g` of the output.

        dx[t] = sum over t's pairs p of g[p] @ kernel[group of p].T
        dkernel[e] = sum over e's pairs p of x[row of p].T @ g[p]

    Rows of other groups are selected to 0 before a sum over rows meets them, so a NaN
    stays in its own row and its own group.
    """
    count, groups = pairs.slot.shape[0], kernel.shape[0]
    if 0 in (count, *kernel.shape):
        return Gradients(jnp.zeros_like(x), jnp.zeros_like(kernel))
    dx_of_pair = jax.lax.platform_dependent(
        cpu=lambda: xla_forms.loop_transposed(
            g, kernel, pairs, block=loop_block(count, groups)
        ),
        default=lambda: xla_forms.batched_transposed(
            g, kernel, pairs, block=batched_block(count, groups)
        ),
    )
    dx = dx_of_pair.reshape(x.shape[0], -1, x.shape[1]).sum(axis=1)
    # An accelerator would wait for the host to learn how many items are in use.
    dkernel = jax.lax.platform_dependent(
        cpu=lambda: _kernel_gradient(x, g, kernel, pairs, unused_too=False),
        default=lambda: _kernel_gradient(x, g, kernel, pairs, unused_too=True),
    )
    return Gradients(dx.astype(x.dtype), dkernel.astype(kernel.dtype))


def _kernel_gradient(
    x: Float[Array, "rows d_in"],
    g: Float[Array, "pairs d_out"],
    kernel: Float[Array, "groups d_in d_out"],
    pairs: Routing,
    *,
    unused_too: bool,
) -> Float[Array, "groups d_in d_out"]:
    """Sums item by item, in the order of the pairs: the same bits in every run.

    An unused item has no rows, so it adds exact zeros.
    """
    count = pairs.slot.shape[0]
    block = batched_block(count, kernel.shape[0])
    dtype = wide_dtype(x, g, kernel)
    precision = precision_of(x, g)
    items = max_work_items(count, kernel.shape[0], block)
    work = work_list(pairs.starts, items, block)
    x_rows = xla_forms.rows_in_order(x, pairs, block)
    g_rows = xla_forms.rows_in_order(g, pairs, block)

    def item(
        i: Int32[Array, ""], total: Float[Array, "groups d_in d_out"]
    ) -> Float[Array, "groups d_in d_out"]:
        group, start, stop = work[0][i], work[1][i], work[2][i]
        mine = start + jnp.arange(block, dtype=jnp.int32) < stop

        def own(rows: Array) -> Array:
            cut = jax.lax.dynamic_slice_in_dim(rows, start, block)
            return jnp.where(mine[:, None], cut, 0).astype(dtype)

        product = jnp.matmul(own(x_rows).T, own(g_rows), precision=precision)
        return total.at[group].add(product)

    trips = items if unused_too else work[3]
    return jax.lax.fori_loop(0, trips, item, jnp.zeros(kernel.shape, dtype))
