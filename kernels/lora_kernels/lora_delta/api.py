"""The public op and the tables of its implementations.

A backend is one module with one function `lora_delta` that has the signature of
`reference.lora_delta`. It refuses, at trace time, what it cannot do by raising
`NotImplementedError` with the reason; the next backend of the order is then tried. A
module is imported when it is first tried, and an `ImportError` counts as a refusal.

A backend is not differentiated: gradients come from a second table, whose modules have
one function `lora_delta_backward` with the signature of `backward.lora_delta_backward`.
"""

import dataclasses
import functools
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lora_kernels.dispatch import (
    Choice,
    Implementation,
    first_accepting,
    names_to_try,
)
from lora_kernels.lora_delta.checks import check_arguments
from lora_kernels.routing import Routing

IMPLEMENTATIONS = MappingProxyType(
    {
        "reference": "lora_kernels.lora_delta.reference",
        "xla": "lora_kernels.lora_delta.xla",
        "xla_partitioned": "lora_kernels.lora_delta.xla_partitioned",
        "triton": "lora_kernels.lora_delta.triton",
        "triton_invariant": "lora_kernels.lora_delta.triton_invariant",
        "mosaic_gpu": "lora_kernels.lora_delta.mosaic_gpu",
    }
)
"""Name -> module of a backend. A new backend is one file and one row."""

BACKWARD_IMPLEMENTATIONS = MappingProxyType(
    {
        "xla": "lora_kernels.lora_delta.backward",
        "triton": "lora_kernels.lora_delta.triton_backward",
        "triton_invariant": "lora_kernels.lora_delta.triton_backward",
    }
)
"""Name -> module of a backward pass; one that has no row here takes `xla`'s."""

DEFAULT_ORDER = MappingProxyType(
    {"cpu": ("xla",), "gpu": ("triton", "mosaic_gpu", "xla"), "tpu": ("xla",)}
)
"""What `implementation=None` tries on each platform (`jax.default_backend()`)."""


def lora_delta(
    x: Float[Array, "tokens d_in"],
    y: Float[Array, "tokens d_out"],
    a: Float[Array, "slots parts max_rank d_in"],
    b: Float[Array, "slots max_rank d_out"],
    *,
    scale: Float[Array, "slots parts"],
    rank: Int32[Array, "slots parts"],
    routing: Routing,
    part_widths: tuple[int, ...],
    implementation: Implementation = None,
) -> Float[Array, "tokens d_out"]:
    """Adds each token's low-rank update to the base layer's output.

    For token `t` of slot `s = routing.slot[t]` and each part `p`, which owns the
    `part_widths[p]` columns `cols` of the output:

        h = (x[t] @ a[s, p, :rank[s, p]].T) * scale[s, p] * routing.weight[t]
        y[t, cols] += h @ b[s, :rank[s, p], cols]

    accumulating in float32 and rounding once, to y's dtype. A row with slot -1 keeps y
    bit for bit. No number of another slot, of a rank tail or of another row reaches a
    row, not even NaN or infinity.

    Args:
      x: input of the base layer.
      y: its output, to add into. A jit that donates it can reuse its memory.
      a: down projections, rank-major; rows from `rank[s, p]` on are ignored.
      b: up projections, rank-major; parts share the rank axis and own columns.
      scale: factor of each slot and part (alpha / rank, or as the adapter says).
      rank: true rank of each slot and part, in `[0, max_rank]`; 0 = not adapted.
      routing: the batch's routing, over as many slots as `a` has.
      part_widths: output columns of each part, in order; they sum to `d_out` (static).
      implementation: a name of `IMPLEMENTATIONS`, several to try in turn, or None for
        the platform's `DEFAULT_ORDER`.
    Returns:
      The new y, in y's dtype.
    Raises:
      ValueError: if shapes disagree, or an implementation has an unknown name.
      NotImplementedError: if every implementation tried refuses; all reasons are given.

    Gradients are defined for x, y, a, b, scale and `routing.weight`, with exact zeros
    for slots without tokens and for rank tails. Forward-mode differentiation is not.

    No kernel here adds atomically. Whether the other rows of a batch can change a row's
    bits, at the same shapes:

        triton_invariant, mosaic_gpu, xla on a CPU   no
        triton                                       the last ones, where some other
                                                     row has the row's adapter
        xla elsewhere, xla_partitioned, reference    not promised: a library multiplies

    With other shapes (tokens, slots) tiles differ, and so may the last bits of all.

    Source: Punica, https://arxiv.org/abs/2310.18547; vLLM 0.32, `add_lora_linear`.
    """
    check_arguments(
        x, y, a, b, scale=scale, rank=rank, routing=routing, part_widths=part_widths
    )
    return delta_of_rows(
        backends_to_try(implementation),
        x,
        y,
        a,
        b,
        scale=scale,
        rank=rank,
        routing=routing,
        part_widths=part_widths,
    )


def backends_to_try(
    implementation: Implementation, *, op: str = "lora_delta"
) -> tuple[str, ...]:
    """Returns names of `IMPLEMENTATIONS`, first to last; `op` is what an error says."""
    default = DEFAULT_ORDER.get(jax.default_backend(), ("xla",))
    return names_to_try(implementation, default=default, table=IMPLEMENTATIONS, op=op)


def delta_of_rows(
    names: tuple[str, ...],
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
    """`lora_delta` of checked arguments, whose x may have a row for several tokens.

    Args:
      names: of `backends_to_try`.
      x: row `t // (tokens / rows)` is the input of token t.
    """
    arrays = map(jnp.asarray, (x, y, a, b, scale, routing.weight))
    return _compiled(names, part_widths, *arrays, (jnp.asarray(rank), routing))


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
    """Returns which implementation `lora_delta` runs on such arguments, and why.

    Traces but computes nothing, so shapes and dtypes (`jax.eval_shape`) are enough.

    Raises:
      ValueError: as `lora_delta`.
      NotImplementedError: as `lora_delta`.
    """
    check_arguments(
        x, y, a, b, scale=scale, rank=rank, routing=routing, part_widths=part_widths
    )
    return choice_of_rows(
        backends_to_try(implementation),
        x,
        y,
        a,
        b,
        scale=scale,
        rank=rank,
        routing=routing,
        part_widths=part_widths,
    )


def choice_of_rows(
    names: tuple[str, ...],
    x: Array | jax.ShapeDtypeStruct,
    y: Array | jax.ShapeDtypeStruct,
    a: Array | jax.ShapeDtypeStruct,
    b: Array | jax.ShapeDtypeStruct,
    *,
    scale: Array | jax.ShapeDtypeStruct,
    rank: Array | jax.ShapeDtypeStruct,
    routing: Routing,
    part_widths: tuple[int, ...],
) -> Choice:
    """`which_implementation` for `delta_of_rows`."""
    choices: list[Choice] = []

    def traced(
        x: Array,
        y: Array,
        a: Array,
        b: Array,
        scale: Array,
        rank: Array,
        routing: Routing,
    ) -> Array:
        choice, result = _forward(names, part_widths, x, y, a, b, scale, rank, routing)
        choices.append(choice)
        return result

    jax.eval_shape(traced, x, y, a, b, scale, rank, routing)
    return choices[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(
    names: tuple[str, ...],
    part_widths: tuple[int, ...],
    x: Array,
    y: Array,
    a: Array,
    b: Array,
    scale: Array,
    weight: Array,
    integers: tuple[Array, Routing],
) -> Array:
    rank, routing = integers
    routing = dataclasses.replace(routing, weight=weight)
    return _forward(names, part_widths, x, y, a, b, scale, rank, routing)[1]


def _save(
    names: tuple[str, ...], part_widths: tuple[int, ...], *arguments: Any
) -> tuple[Array, tuple[Any, ...]]:
    x, _, *rest = arguments
    return _differentiable(names, part_widths, *arguments), (x, *rest)


def _backward(
    names: tuple[str, ...],
    part_widths: tuple[int, ...],
    saved: tuple[Any, ...],
    g: Array,
) -> tuple[Array | None, ...]:
    x, a, b, scale, weight, (rank, routing) = saved
    routing = dataclasses.replace(routing, weight=weight)
    tried = [name for name in names if name in BACKWARD_IMPLEMENTATIONS]
    _, gradients = first_accepting(
        [*tried, "xla"],
        BACKWARD_IMPLEMENTATIONS,
        "lora_delta_backward",
        lambda implementation: implementation(
            x, g, a, b, scale=scale, rank=rank, routing=routing, part_widths=part_widths
        ),
    )
    dx, da, db, dscale, dweight = gradients
    return dx, g, da, db, dscale, dweight, None


_differentiable.defvjp(_save, _backward)

# Without it a call outside jit would compile the implementation's branches every time.
_compiled = jax.jit(_differentiable, static_argnums=(0, 1))


def _forward(
    names: tuple[str, ...],
    part_widths: tuple[int, ...],
    x: Array,
    y: Array,
    a: Array,
    b: Array,
    scale: Array,
    rank: Array,
    routing: Routing,
) -> tuple[Choice, Array]:
    return first_accepting(
        names,
        IMPLEMENTATIONS,
        "lora_delta",
        lambda implementation: implementation(
            x, y, a, b, scale=scale, rank=rank, routing=routing, part_widths=part_widths
        ),
    )
