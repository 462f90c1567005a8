"""The public op. A pair of token and expert is a row of `lora_delta`, so is its code.

Slot arrays lose the axis of experts to that of slots (a reshape, no copy), and the
pairs of a token share its row of x. Implementations, their order and their gradients
are those of `lora_delta.api`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lora_kernels.dispatch import Choice, Implementation
from lora_kernels.lora_delta.api import (
    backends_to_try,
    choice_of_rows,
    delta_of_rows,
)
from lora_kernels.lora_experts.checks import check_arguments
from lora_kernels.routing import Routing


def lora_experts(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "pairs d_out"],
    a: Float[Array, "slots experts parts max_rank d_in"],
    b: Float[Array, "slots experts max_rank d_out"],
    *,
    scale: Float[Array, "slots experts parts"],
    rank: Int32[Array, "slots experts parts"],
    routing: Routing,
    part_widths: tuple[int, ...],
    implementation: Implementation = None,
) -> Float[Array, "pairs d_out"]:
    """Adds to each pair's output the low-rank update of its adapter and expert.

    A pair is one choice of a token's router. For pair `p` of slot `s` and expert `e`,
    `routing.slot[p] = s * experts + e`, and each part `q`, which owns the
    `part_widths[q]` columns `cols` of the output:

        h = (x[p // k] @ a[s, e, q, :rank[s, e, q]].T) * scale[s, e, q] * weight[p]
        y[p, cols] += h @ b[s, e, :rank[s, e, q], cols]

    with `k = pairs / rows`: the choices of a token in the first projection of an
    expert, where they share its row of x, and 1 in the second. Accumulates in float32
    and rounds once, to y's dtype. A pair of slot -1 (base row, or an expert elsewhere)
    keeps y bit for bit. No number of another slot, another expert, a rank tail or
    another row reaches a pair, not even NaN or infinity.

    Args:
      x: input of the experts' layer, a row for each token or for each pair.
      y: its output for each pair, to add into. A jit that donates it can reuse it.
      a: down projections, rank-major; rows from `rank[s, e, q]` on are ignored.
      b: up projections, rank-major; parts share the rank axis and own columns.
      scale: factor of each slot, expert and part.
      rank: true rank of each, in `[0, max_rank]`; 0 = this expert is not adapted.
      routing: of `pair_routing`, over `slots * experts` virtual slots.
      part_widths: output columns of each part, in order; they sum to `d_out` (static).
      implementation: as in `lora_delta`.
    Returns:
      The new y, in y's dtype.
    Raises:
      ValueError: if shapes disagree, or an implementation has an unknown name.
      NotImplementedError: if every implementation tried refuses; all reasons are given.

    Gradients are those of `lora_delta`; a row of x has the sum over its pairs.

    Source: vLLM 0.32, `add_lora_fused_moe`.
    """
    check_arguments(
        x, y, a, b, scale=scale, rank=rank, routing=routing, part_widths=part_widths
    )
    return delta_of_rows(
        backends_to_try(implementation, op="lora_experts"),
        x,
        y,
        *map(_virtual, (a, b)),
        scale=_virtual(scale),
        rank=_virtual(rank),
        routing=routing,
        part_widths=part_widths,
    )


def which_implementation(
    x: Array | jax.ShapeDtypeStruct,
    y: Array | jax.ShapeDtypeStruct,
    a: Array | jax.ShapeDtypeStruct,
    b: Array | jax.ShapeDtypeStruct,
    *,
    scale: Array | jax.ShapeDtypeStruct,
    rank: Array | jax.ShapeDtypeStruct,
    routing: Routing,
    part_widths: tuple[int, ...],
    implementation: Implementation = None,
) -> Choice:
    """Returns which implementation `lora_experts` runs on such arguments, and why.

    Traces but computes nothing, so shapes and dtypes (`jax.eval_shape`) are enough.

    Raises:
      ValueError: as `lora_experts`.
      NotImplementedError: as `lora_experts`.
    """
    check_arguments(
        x, y, a, b, scale=scale, rank=rank, routing=routing, part_widths=part_widths
    )
    a, b, scale, rank = (
        jax.eval_shape(_virtual, array) for array in (a, b, scale, rank)
    )
    return choice_of_rows(
        backends_to_try(implementation, op="lora_experts"),
        x,
        y,
        a,
        b,
        scale=scale,
        rank=rank,
        routing=routing,
        part_widths=part_widths,
    )


def _virtual(array: Array) -> Array:
    """Returns a slot array over virtual slots."""
    slots, experts, *rest = array.shape
    return jnp.reshape(array, (slots * experts, *rest))
