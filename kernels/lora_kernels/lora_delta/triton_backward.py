"""Gradients of `lora_delta` as Triton kernels; the formulas are in `backward`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lora_kernels import triton_launch
from lora_kernels.lora_delta.backward import Gradients
from lora_kernels.lora_delta.site import tokens_per_row
from lora_kernels.lora_delta.triton import checked_call
from lora_kernels.lora_delta.triton_forms import (
    Call,
    expand_launch,
    grouped_launch,
    shrink_launch,
)
from lora_kernels.routing import Routing


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
    """Returns the cotangents; see `backward.lora_delta_backward`.

    With `u = x A^T` and `v = g B^T` in memory, sorted by slot: dx is an expand of v
    with A, dA and dB are grouped products, and the rest is sums of `u * v`.
    """
    call = checked_call(x, g, a, b, scale, rank, routing, part_widths)
    if 0 in (*x.shape, *g.shape, call.max_rank):
        raise NotImplementedError("an axis of length 0")
    (u,) = triton_launch.run(shrink_launch(x, a, call))
    (v,) = triton_launch.run(shrink_launch(g, b, call))
    shared = tokens_per_row(x, routing)
    # What tokens that share a row add to it is summed before it is rounded.
    dtype = x.dtype if shared == 1 else jnp.float32
    zeros = jnp.zeros((g.shape[0], x.shape[1]), dtype)
    (dx,) = triton_launch.run(expand_launch(v, zeros, a, call))
    dx = dx.reshape(x.shape[0], shared, x.shape[1]).sum(axis=1).astype(x.dtype)
    (da,) = triton_launch.run(grouped_launch(v, x, a, call))
    (db,) = triton_launch.run(grouped_launch(u, g, b, call))
    dscale, dweight = _of_factors(u.sum(axis=0), v.sum(axis=0), call)
    return Gradients(dx, da, db, dscale.astype(scale.dtype), dweight)


def _of_factors(
    u: Float[Array, "tokens ranks"], v: Float[Array, "tokens ranks"], call: Call
) -> tuple[Float[Array, "slots parts"], Float[Array, " tokens"]]:
    # u and v are in sorted order, and hold garbage where no kernel has written.
    routing = call.routing
    slot = routing.slot[routing.order]
    own = jnp.maximum(slot, 0)
    kept = jnp.arange(call.max_rank)[None, None, :] < call.rank[own][:, :, None]
    kept &= (slot >= 0)[:, None, None]
    uv = jnp.where(kept, (u * v).reshape(kept.shape), 0).sum(axis=2)  # [tokens, parts]
    present = kept.any(axis=2)
    dweight = jnp.sum(jnp.where(present, uv * call.scale[own], 0), axis=1)
    dweight = jnp.zeros_like(dweight).at[routing.order].set(dweight)
    weight = routing.weight[routing.order][:, None]
    uv = jnp.where(present, uv * weight, 0)
    return _sums_of_slots(uv, routing), dweight


def _sums_of_slots(
    rows: Float[Array, "tokens parts"], routing: Routing
) -> Float[Array, "slots parts"]:
    # Sums of consecutive rows by a scan: its work does not grow with the slots, and
    # unlike that of a scatter its order is fixed.
    def add(
        left: tuple[Array, Array], right: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        same_slot = (left[0] == right[0])[:, None]
        return right[0], right[1] + jnp.where(same_slot, left[1], 0)

    slot = routing.slot[routing.order]
    _, sums = jax.lax.associative_scan(add, (slot, rows))
    last = jnp.maximum(routing.starts[2:] - 1, 0)
    return jnp.where((routing.counts > 0)[:, None], sums[last], 0)
