"""Rotary position embedding: the angles of each kind of scaling, and the rotation.

Knows the kinds that Llama-like configs name (default, linear, llama3, yarn, longrope);
the kind whose angles depend on the running length (dynamic) is not here.

Source: transformers `modeling_rope_utils.py`; RoFormer, https://arxiv.org/abs/2104.09864;
YaRN, https://arxiv.org/abs/2309.00071.
"""

import abc
import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Rotary(abc.ABC):
    """How far each pair of features turns per position.

    Attributes:
      theta: base of the wavelengths.
      dim: rotated features of a head, even; the rest of the head is left as it is.
      attention_factor: what cosine and sine are multiplied with.
    """

    theta: float
    dim: int
    attention_factor: float = dataclasses.field(default=1.0, kw_only=True)

    @abc.abstractmethod
    def frequencies(self) -> Float[np.ndarray, " half"]:
        """Returns the angle per position of each pair, float64, `half = dim / 2`."""

    def unscaled(self) -> Float[np.ndarray, " half"]:
        """Returns the angles of a context that was never stretched."""
        return self.theta ** -(np.arange(0, self.dim, 2) / self.dim)


@dataclasses.dataclass(frozen=True)
class DefaultRotary(Rotary):
    """No scaling."""

    def frequencies(self) -> Float[np.ndarray, " half"]:
        return self.unscaled()


@dataclasses.dataclass(frozen=True)
class LinearRotary(Rotary):
    """Every angle divided by `factor`."""

    factor: float

    def frequencies(self) -> Float[np.ndarray, " half"]:
        return self.unscaled() / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Rotary(Rotary):
    """Keeps short waves, stretches long ones, blends linearly between the bounds.

    Attributes:
      factor: how many times longer the context became.
      original_positions: context length before that, in tokens.
      low_freq_factor, high_freq_factor: bounds, in turns over the old context.
    """

    factor: float
    original_positions: int
    low_freq_factor: float
    high_freq_factor: float

    def frequencies(self) -> Float[np.ndarray, " half"]:
        plain = self.unscaled()
        turns = self.original_positions * plain / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0, 1)
        return plain * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class YarnRotary(Rotary):
    """Keeps features that turn often, stretches those that turn rarely, by a ramp.

    Attributes:
      factor: how many times longer the context became.
      original_positions: context length before that, in tokens.
      beta_fast, beta_slow: bounds, in turns over the old context.
      truncate: whether the bounds are rounded to whole features.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool

    def frequencies(self) -> Float[np.ndarray, " half"]:
        low, high = self._bounds()
        ramp = (np.arange(self.dim // 2) - low) / (high - low)
        stretched = np.clip(ramp, 0, 1)
        plain = self.unscaled()
        return plain * (1 - stretched) + plain / self.factor * stretched

    def _bounds(self) -> tuple[float, float]:
        low, high = self._feature(self.beta_fast), self._feature(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(float(low), 0.0), min(float(high), float(self.dim - 1))
        # Equal bounds would divide by zero; transformers widens them by as much.
        return low, high + 0.001 if low == high else high

    def _feature(self, turns: float) -> float:
        """Returns the feature index that makes `turns` turns over the old context."""
        wavelengths = self.original_positions / (turns * 2 * math.pi)
        return self.dim * math.log(wavelengths) / (2 * math.log(self.theta))


@dataclasses.dataclass(frozen=True)
class LongRotary(Rotary):
    """Each angle divided by a factor of its own: Phi-3's long context, short form.

    Such a model has a second list of factors for texts longer than `original_positions`
    and changes over in the middle of a text, which makes all its cached keys wrong.
    Here the first list is used and texts end at `original_positions`.

    Attributes:
      original_positions: longest text, in tokens, that these factors are for.
      factors: one for each pair of features.
    """

    original_positions: int
    factors: tuple[float, ...]

    def frequencies(self) -> Float[np.ndarray, " half"]:
        return self.unscaled() / np.array(self.factors)


def long_attention_factor(factor: float, original_positions: int) -> float:
    """Returns longrope's temperature where a config gives none.

    Source: LongRoPE, https://arxiv.org/abs/2402.13753.
    """
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_positions))


def yarn_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """Returns yarn's temperature where a config gives none; scales of 0 are not given.

    Source: YaRN, equation 22, and DeepSeek's two `mscale` keys.
    """

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def rotary_angles(
    rotary: Rotary, positions: Int[Array, "..."]
) -> tuple[Float[Array, "... half"], Float[Array, "... half"]]:
    """Returns the cosine and sine for each position, float32, `half = dim / 2`."""
    frequencies = rotary.frequencies().astype(np.float32)
    angles = positions[..., None].astype(jnp.float32) * jnp.reshape(
        frequencies, (1,) * positions.ndim + (-1,)
    )
    scale = rotary.attention_factor
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "*tokens heads head_dim"],
    cos: Float[Array, "*#tokens half"],
    sin: Float[Array, "*#tokens half"],
) -> Float[Array, "*tokens heads head_dim"]:
    """Turns the pair (i, i + half) of each head by its token's angle.

    The pairing is Hugging Face's: first half with second half, not neighbours.
    """
    half = cos.shape[-1]
    cos, sin = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*turned, rest], axis=-1)
