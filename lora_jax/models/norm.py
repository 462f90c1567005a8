"""Normalisations over the last axis, rounded where transformers rounds."""

import abc

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class Norm(nnx.Module, abc.ABC):
    """Brings each token's features to unit size, then scales each feature.

    Args:
      features: width of the last axis.
      eps: what is added to the mean square.
      dtype: dtype of the parameters.
    """

    @abc.abstractmethod
    def __init__(self, features: int, *, eps: float, dtype: DTypeLike): ...

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        """Returns the normalised `x`, in its own dtype."""


class RMSNorm(Norm):
    """Divides by the root mean square.

    The division is done in float32 and rounded to the input's dtype before the product
    with `scale`, as transformers does; `nnx.RMSNorm` rounds elsewhere in bfloat16.
    """

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((features,), jnp.dtype(dtype)))
        self.eps = eps

    def __call__(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        """Returns the normalised `x`, in its own dtype."""
        normed = _unit_root_mean_square(x.astype(jnp.float32), self.eps)
        return normed.astype(x.dtype) * _broadcast(self.scale[...], x)


class WideRMSNorm(Norm):
    """Divides by the root mean square and scales in float32, rounds once: gpt-oss."""

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((features,), jnp.dtype(dtype)))
        self.eps = eps

    def __call__(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        """Returns the normalised `x`, in its own dtype."""
        normed = _unit_root_mean_square(x.astype(jnp.float32), self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (normed * _broadcast(scale, x)).astype(x.dtype)


class OffsetRMSNorm(Norm):
    """Divides by the root mean square and multiplies with `1 + scale`: Gemma's norm.

    Everything is done in float32 and rounded once.
    """

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.zeros((features,), jnp.dtype(dtype)))
        self.eps = eps

    def __call__(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        """Returns the normalised `x`, in its own dtype."""
        normed = _unit_root_mean_square(x.astype(jnp.float32), self.eps)
        scale = 1.0 + self.scale[...].astype(jnp.float32)
        return (normed * _broadcast(scale, x)).astype(x.dtype)


class LayerNorm(Norm):
    """Subtracts the mean, divides by the standard deviation, scales and shifts.

    Everything is done in float32 and rounded once.
    """

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((features,), jnp.dtype(dtype)))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.dtype(dtype)))
        self.eps = eps

    def __call__(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        """Returns the normalised `x`, in its own dtype."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = _unit_root_mean_square(centred, self.eps)
        scale, bias = (p[...].astype(jnp.float32) for p in (self.scale, self.bias))
        return (normed * _broadcast(scale, x) + _broadcast(bias, x)).astype(x.dtype)


NORMS: dict[str, type[Norm]] = {
    "rms": RMSNorm,
    "rms_wide": WideRMSNorm,
    "rms_offset": OffsetRMSNorm,
    "layer": LayerNorm,
}
"""The values of `ModelConfig.norm`."""


def _unit_root_mean_square(x: Array, eps: float) -> Array:
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + eps)


def _broadcast(parameter: Float[Array, " d"], x: Array) -> Array:
    return jnp.reshape(parameter, (1,) * (x.ndim - 1) + (-1,))
