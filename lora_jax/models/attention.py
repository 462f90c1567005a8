"""Self-attention of a decoder layer, over a whole prompt or of one token a row."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from lora_jax.models.attend import attend, causal_attend, seen_in_cache
from lora_jax.models.cache import write_position
from lora_jax.models.config import ModelConfig
from lora_jax.models.linear import linear_of_parts, plain_linear
from lora_jax.models.norm import NORMS
from lora_jax.models.rotary import rotate

Angles = tuple[Float[Array, "*#tokens half"], Float[Array, "*#tokens half"]]
"""Cosine and sine for each token, see `rotary_angles`."""


class Attention(nnx.Module):
    """Attention with rotary positions, and with norms of queries and keys if asked.

    Args:
      config: widths, biases, scales.
      window: how many positions a token sees, itself included; `None` sees all before.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        window: int | None,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.window = window
        self.scale = config.query_scale
        self.softcap = config.attention_softcap
        self.qk_norm = config.qk_norm
        d, q_width = config.hidden_size, self.heads * self.head_dim
        self.qkv_proj = linear_of_parts(
            d, config.qkv_parts, use_bias=config.qkv_bias, dtype=dtype, rngs=rngs
        )
        self.o_proj = plain_linear(
            q_width, d, use_bias=config.o_bias, dtype=dtype, rngs=rngs
        )
        self.clip_qkv = config.clip_qkv
        self.sinks: nnx.Param | None = nnx.data(None)
        if config.sinks:
            self.sinks = nnx.Param(jnp.zeros((self.heads,), jnp.dtype(dtype)))
        if config.qk_norm is not None:
            norm, eps = NORMS[config.norm], config.norm_eps
            q_normed, k_normed = {
                "head": (1, 1),
                "whole": (self.heads, self.kv_heads),
            }[config.qk_norm]
            self.q_norm = norm(q_normed * self.head_dim, eps=eps, dtype=dtype)
            self.k_norm = norm(k_normed * self.head_dim, eps=eps, dtype=dtype)

    def prefill(
        self, x: Float[Array, "batch time d"], angles: Angles
    ) -> tuple[
        Float[Array, "batch time d"],
        Float[Array, "batch kv_heads time head_dim"],
        Float[Array, "batch kv_heads time head_dim"],
    ]:
        """Returns the attention's output and the keys and values of the prompt."""
        q, k, v = self._project(x, angles)
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        mixed = causal_attend(
            q,
            k,
            v,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self._sinks(),
        )
        return self.o_proj(mixed), k, v

    def decode(
        self,
        x: Float[Array, "batch d"],
        angles: Angles,
        positions: Int[Array, " batch"],
        keys: Float[Array, "batch kv_heads positions head_dim"],
        values: Float[Array, "batch kv_heads positions head_dim"],
    ) -> tuple[
        Float[Array, "batch d"],
        Float[Array, "batch kv_heads positions head_dim"],
        Float[Array, "batch kv_heads positions head_dim"],
    ]:
        """Returns the attention's output, and keys and values with each row's own."""
        q, k, v = self._project(x, angles)
        keys = write_position(keys, positions, k)
        values = write_position(values, positions, v)
        seen = seen_in_cache(positions, keys.shape[2], self.window)
        mixed = attend(
            q[:, None],
            keys,
            values,
            seen,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self._sinks(),
        )
        return self.o_proj(mixed[:, 0]), keys, values

    def _project(
        self, x: Float[Array, "*tokens d"], angles: Angles
    ) -> tuple[
        Float[Array, "*tokens heads head_dim"],
        Float[Array, "*tokens kv_heads head_dim"],
        Float[Array, "*tokens kv_heads head_dim"],
    ]:
        fused = self.qkv_proj(x)
        borders = [self.heads, self.heads + self.kv_heads]
        q, k, v = jnp.split(fused, [self.head_dim * b for b in borders], axis=-1)
        if self.qk_norm == "whole":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (self._by_head(self._clipped(part)) for part in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *angles), rotate(k, *angles), v

    def _by_head(
        self, x: Float[Array, "*tokens width"]
    ) -> Float[Array, "*tokens heads head_dim"]:
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)

    def _clipped(self, x: Float[Array, "*tokens width"]) -> Array:
        bound = self.clip_qkv
        return x if bound is None else jnp.clip(x, -bound, bound)

    def _sinks(self) -> Float[Array, " heads"] | None:
        return None if self.sinks is None else self.sinks[...]
