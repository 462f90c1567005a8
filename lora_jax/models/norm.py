"""Root-mean-square normalisation, rounded where transformers rounds."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis, then scales each feature.

    The division is done in float32 and rounded to the input's dtype before the product
    with `scale`, as transformers does; `nnx.RMSNorm` rounds elsewhere in bfloat16.

    Args:
      features: width of the last axis.
      eps: what is added to the mean square.
      dtype: dtype of `scale`.
    """

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((features,), jnp.dtype(dtype)))
        self.eps = eps

    def __call__(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        """Returns the normalised `x`, in its own dtype."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        return normed * jnp.reshape(self.scale[...], (1,) * (x.ndim - 1) + (-1,))
