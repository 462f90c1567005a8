"""The public op and the tables of its implementations.

A backend is one module with one function `grouped_dot` that has the signature of
`reference.grouped_dot`. It refuses, at trace time, what it cannot do by raising
`NotImplementedError` with the reason; the next backend of the order is then tried. A
module is imported when it is first tried, and an `ImportError` counts as a refusal.

A backend is not differentiated: gradients come from a second table, whose modules have
one function `grouped_dot_backward` with the signature of
`backward.grouped_dot_backward`.
"""

import functools
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lora_kernels.dispatch import (
    Choice,
    Implementation,
    first_accepting,
    names_to_try,
)
from lora_kernels.grouped_dot.checks import check_arguments
from lora_kernels.grouped_dot.shapes import Kernel
from lora_kernels.routing import Routing

IMPLEMENTATIONS = MappingProxyType(
    {
        "reference": "lora_kernels.grouped_dot.reference",
        "xla": "lora_kernels.grouped_dot.xla",
        "triton": "lora_kernels.grouped_dot.triton",
    }
)
"""Name -> module of a backend. A new backend is one file and one row."""

BACKWARD_IMPLEMENTATIONS = MappingProxyType(
    {
        "xla": "lora_kernels.grouped_dot.backward",
        "triton": "lora_kernels.grouped_dot.triton_backward",
    }
)
"""Name -> module of a backward pass; one that has no row here takes `xla`'s."""

DEFAULT_ORDER = MappingProxyType(
    {"cpu": ("xla",), "gpu": ("triton", "xla"), "tpu": ("xla",)}
)
"""What `implementation=None` tries on each platform (`jax.default_backend()`)."""


def grouped_dot(
    x: Float[Array, "rows d_in"],
    kernel: Kernel,
    pairs: Routing,
    *,
    implementation: Implementation = None,
) -> Float[Array, "pairs d_out"]:
    """Multiplies each row by the kernels of the groups that it is paired with.

    With `k = pairs // rows` pairs a row, row by row:

        out[p] = x[p // k] @ kernel[pairs.slot[p]]

    accumulating in float32 and rounding once, to x's dtype. The work grows with the
    pairs, never with rows times groups. A pair of slot -1 is exactly zeros. No number
    of another group or row reaches a pair, not even NaN or infinity, and a pair's bits
    do not depend on the groups of the others.

    Args:
      x: the rows, each once.
      kernel: one matrix for each group, of floats or int8. Of int8 kernels only the
        tiles at work are widened, except in a backward pass.
      pairs: `make_routing(group of each pair, groups)`, over `k` pairs a row. Its
        weights are not used.
      implementation: a name of `IMPLEMENTATIONS`, several to try in turn, or None for
        the platform's `DEFAULT_ORDER`.
    Returns:
      Each pair's product, in the order of the pairs and in x's dtype.
    Raises:
      ValueError: if shapes disagree, or an implementation has an unknown name.
      NotImplementedError: if every implementation tried refuses; all reasons are given.

    Gradients are defined for x and a kernel of floats, with exact zeros for groups
    without pairs.
    Forward-mode differentiation is not.

    Example:
      >>> import jax.numpy as jnp
      >>> from lora_kernels import make_routing
      >>> pairs = make_routing(jnp.array([2, 0, -1, 2]), 3)
      >>> kernel = jnp.arange(1.0, 4.0)[:, None, None]
      >>> grouped_dot(jnp.array([[10.0], [20.0]]), kernel, pairs).ravel().tolist()
      [30.0, 10.0, 0.0, 60.0]
    """
    check_arguments(x, kernel, pairs)
    names = _names_to_try(implementation)
    return _compiled(names, jnp.asarray(x), jnp.asarray(kernel), pairs)


def which_implementation(
    x: Array | jax.ShapeDtypeStruct,
    kernel: Array | jax.ShapeDtypeStruct,
    pairs: Routing,
    *,
    implementation: Implementation = None,
) -> Choice:
    """Returns which implementation `grouped_dot` runs on such arguments, and why.

    Traces but computes nothing, so shapes and dtypes (`jax.eval_shape`) are enough.

    Raises:
      ValueError: as `grouped_dot`.
      NotImplementedError: as `grouped_dot`.
    """
    check_arguments(x, kernel, pairs)
    names = _names_to_try(implementation)
    choices: list[Choice] = []

    def traced(x: Array, kernel: Array, pairs: Routing) -> Array:
        choice, result = _forward(names, x, kernel, pairs)
        choices.append(choice)
        return result

    jax.eval_shape(traced, x, kernel, pairs)
    return choices[0]


def _names_to_try(implementation: Implementation) -> tuple[str, ...]:
    default = DEFAULT_ORDER.get(jax.default_backend(), ("xla",))
    return names_to_try(
        implementation, default=default, table=IMPLEMENTATIONS, op="grouped_dot"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(
    names: tuple[str, ...], x: Array, kernel: Array, pairs: Routing
) -> Array:
    return _forward(names, x, kernel, pairs)[1]


def _save(
    names: tuple[str, ...], x: Array, kernel: Array, pairs: Routing
) -> tuple[Array, tuple[Array, Array, Routing]]:
    return _differentiable(names, x, kernel, pairs), (x, kernel, pairs)


def _backward(
    names: tuple[str, ...], saved: tuple[Array, Array, Routing], g: Array
) -> tuple[Array, Array | None, None]:
    x, kernel, pairs = saved
    is_integer = jnp.issubdtype(kernel.dtype, jnp.integer)
    if is_integer:
        kernel = kernel.astype(x.dtype)
    tried = [name for name in names if name in BACKWARD_IMPLEMENTATIONS]
    _, (dx, dkernel) = first_accepting(
        [*tried, "xla"],
        BACKWARD_IMPLEMENTATIONS,
        "grouped_dot_backward",
        lambda implementation: implementation(x, g, kernel, pairs),
    )
    return dx, None if is_integer else dkernel, None


_differentiable.defvjp(_save, _backward)

# Without it a call outside jit would compile the implementation's branches every time.
_compiled = jax.jit(_differentiable, static_argnums=(0,))


def _forward(
    names: tuple[str, ...], x: Array, kernel: Array, pairs: Routing
) -> tuple[Choice, Array]:
    return first_accepting(
        names,
        IMPLEMENTATIONS,
        "grouped_dot",
        lambda implementation: implementation(x, kernel, pairs),
    )
