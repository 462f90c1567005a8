"""The head of a model whose output weights are its embedding table."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


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
        return jnp.dot(hidden, embedding.T)
