"""The gated feed-forward block: `down(act(gate(x)) * up(x))`."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lora_jax.models.activations import ACTIVATIONS
from lora_jax.models.config import ModelConfig
from lora_jax.models.linear import linear_of_parts, plain_linear


class GatedMLP(nnx.Module):
    """Gate and up as one product, then down.

    Args:
      config: the facts of the model.
      width: inside the block.
      dtype, rngs: as in the other layers.
    """

    def __init__(
        self, config: ModelConfig, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.gate_up_proj = linear_of_parts(
            config.hidden_size,
            config.gate_up_parts(width),
            use_bias=config.mlp_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.down_proj = plain_linear(
            width, config.hidden_size, use_bias=config.mlp_bias, dtype=dtype, rngs=rngs
        )
        self.hidden_act = config.hidden_act

    def __call__(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        """Returns the block's output, without the residual."""
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(ACTIVATIONS[self.hidden_act](gate) * up)
