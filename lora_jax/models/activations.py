"""The activations of feed-forward blocks, by Hugging Face's names."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""The slope inside, and the bound of, gpt-oss' gate."""

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}
"""Hugging Face's `hidden_act` names."""


def _swiglu_oai(gate: Array, up: Array) -> Array:
    """Returns gpt-oss' product: both sides bounded, and up shifted by one."""
    gate = jnp.minimum(gate, SWIGLU_LIMIT)
    up = jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * (gate * jax.nn.sigmoid(gate * SWIGLU_ALPHA))


GATES: dict[str, Callable[[Array, Array], Array]] = {"swiglu_oai": _swiglu_oai}
"""Gated products that are more than `act(gate) * up`."""


def gated(name: str, gate: Array, up: Array) -> Array:
    """Returns the gated product that `name`, a key of either table, stands for."""
    if name in GATES:
        return GATES[name](gate, up)
    return ACTIVATIONS[name](gate) * up
