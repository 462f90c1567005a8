"""Rotary position embedding: which angles a config asks for, and the rotation itself.

Knows the four kinds of scaling that Llama-like configs name (default, linear, llama3,
yarn). Kinds whose angles depend on the length of the running sequence (dynamic,
longrope) are refused by `lora_jax.models.config`.

Source: transformers `modeling_rope_utils.py`; RoFormer, https://arxiv.org/abs/2104.09864;
YaRN, https://arxiv.org/abs/2309.00071.
"""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """What the angles are made of; fields that a kind does not use are `None`.

    Attributes:
      kind: a key of `KINDS`.
      theta: base of the wavelengths.
      dim: rotated features of a head, even; the rest of the head is left as it is.
      factor: how many times longer the context became.
      original_max_positions: context length before it was stretched.
      low_freq_factor, high_freq_factor: llama3's bounds.
      beta_fast, beta_slow: yarn's bounds, in rotations.
      truncate: whether yarn rounds its bounds to whole features.
      attention_factor: what cos and sin are multiplied with.
    """

    kind: str
    theta: float
    dim: int
    factor: float | None = None
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    attention_factor: float = 1.0


def inverse_frequencies(config: RotaryConfig) -> Float[np.ndarray, " half"]:
    """Returns the angle by which each pair of features turns per position, float32."""
    return KINDS[config.kind](config).astype(np.float32)


def rotary_angles(
    config: RotaryConfig, positions: Int[Array, "..."]
) -> tuple[Float[Array, "... half"], Float[Array, "... half"]]:
    """Returns the cosine and sine for each position, float32, `half = dim / 2`."""
    angles = positions[..., None].astype(jnp.float32) * jnp.reshape(
        inverse_frequencies(config), (1,) * positions.ndim + (-1,)
    )
    scale = config.attention_factor
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "*tokens heads head_dim"],
    cos: Float[Array, "*tokens half"],
    sin: Float[Array, "*tokens half"],
) -> Float[Array, "*tokens heads head_dim"]:
    """Turns the pair (i, i + half) of each head by its angle.

    The pairing is Hugging Face's: first half with second half, not neighbours.
    """
    half = cos.shape[-1]
    cos, sin = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*turned, rest], axis=-1)


def yarn_attention_factor(
    factor: float, mscale: float | None, mscale_all_dim: float | None
) -> float:
    """Returns yarn's temperature where the config does not give `attention_factor`."""

    def log_scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return log_scale(mscale) / log_scale(mscale_all_dim)
    return log_scale(1.0)


def _default(config: RotaryConfig) -> np.ndarray:
    return config.theta ** -(np.arange(0, config.dim, 2) / config.dim)


def _linear(config: RotaryConfig) -> np.ndarray:
    assert config.factor is not None
    return _default(config) / config.factor


def _llama3(config: RotaryConfig) -> np.ndarray:
    """Keeps short waves, stretches long ones, and blends linearly between the bounds."""
    assert config.factor is not None and config.original_max_positions is not None
    assert config.low_freq_factor is not None and config.high_freq_factor is not None
    plain = _default(config)
    turns = config.original_max_positions * plain / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    kept = np.clip((turns - config.low_freq_factor) / span, 0, 1)
    return plain * (kept + (1 - kept) / config.factor)


def _yarn(config: RotaryConfig) -> np.ndarray:
    """Keeps features that turn often, stretches those that turn rarely, by a ramp."""
    assert config.factor is not None
    low, high = _yarn_range(config)
    ramp = (np.arange(config.dim // 2) - low) / (high - low)
    stretched = np.clip(ramp, 0, 1)
    plain = _default(config)
    return plain * (1 - stretched) + plain / config.factor * stretched


def _yarn_range(config: RotaryConfig) -> tuple[float, float]:
    assert config.beta_fast is not None and config.beta_slow is not None
    low = _yarn_feature(config, config.beta_fast)
    high = _yarn_feature(config, config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    # Equal bounds would divide by zero; transformers widens them by the same amount.
    return low, high + 0.001 if low == high else high


def _yarn_feature(config: RotaryConfig, rotations: float) -> float:
    """Returns the feature index that makes `rotations` turns over the old context."""
    assert config.original_max_positions is not None
    wavelengths = config.original_max_positions / (rotations * 2 * math.pi)
    return config.dim * math.log(wavelengths) / (2 * math.log(config.theta))


KINDS: dict[str, Callable[[RotaryConfig], np.ndarray]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""How each kind makes its inverse frequencies, float64 `(dim / 2,)`."""
