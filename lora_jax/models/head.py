"""The head of a model whose output weights are its embedding table."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

DECODE_ROWS = 64
"""Most rows for which a CPU multiplies the table with them, and not them with it."""


class TiedHead(nnx.Module):
    """Maps hidden states to logits with weights that it is given and does not hold.

    It is a module so that the head has a place and a name of its own (`lm_head`),
    although the checkpoint has none.

    Args:
      in_features: width of hidden states.
      out_features: size of the vocabulary.
    """

    def __init__(self, in_features: int, out_features: int):
        self.in_features = in_features
        self.out_features = out_features

    def __call__(
        self, hidden: Float[Array, "*tokens d"], embedding: Float[Array, "vocab d"]
    ) -> Float[Array, "*tokens vocab"]:
        """Returns the logits of hidden states, in their dtype."""
        if not 1 < math.prod(hidden.shape[:-1]) <= DECODE_ROWS:
            return _hidden_first(hidden, embedding)
        return jax.lax.platform_dependent(
            hidden, embedding, cpu=_table_first, default=_hidden_first
        )


def _hidden_first(
    hidden: Float[Array, "*tokens d"], embedding: Float[Array, "vocab d"]
) -> Float[Array, "*tokens vocab"]:
    return jnp.dot(hidden, embedding.T)


def _table_first(
    hidden: Float[Array, "*tokens d"], embedding: Float[Array, "vocab d"]
) -> Float[Array, "*tokens vocab"]:
    """Returns the same with the table as the product's left operand.

    XLA's products of few rows are up to 1.5 times as fast this way round; the barrier
    keeps it from turning them back.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = jax.lax.optimization_barrier(jnp.dot(embedding, rows.T)).T
    return logits.reshape(*hidden.shape[:-1], -1)
