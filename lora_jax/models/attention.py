"""Grouped-query attention over a whole prompt, and of one token against a cache.

Keys and values are never repeated for the query heads that share them: queries carry a
group axis instead.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from lora_jax.models.cache import write_position
from lora_jax.models.config import ModelConfig
from lora_jax.models.linear import FusedLinear, plain_linear
from lora_jax.models.norm import RMSNorm
from lora_jax.models.rotary import rotate

Angles = tuple[Float[Array, "*#tokens half"], Float[Array, "*#tokens half"]]
"""Cosine and sine for each token, see `rotary_angles`."""


class Attention(nnx.Module):
    """Self-attention of one decoder layer.

    Args:
      config: widths, biases, and whether queries and keys are normed per head.
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
        self.heads, self.kv_heads = (
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        self.head_dim = config.head_dim
        self.window = window
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.qkv_proj = FusedLinear(
            config.hidden_size,
            (("q_proj", q_width), ("k_proj", kv_width), ("v_proj", kv_width)),
            use_bias=config.qkv_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.o_proj = plain_linear(
            q_width, config.hidden_size, use_bias=config.o_bias, dtype=dtype, rngs=rngs
        )
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps, dtype=dtype)
        self.qk_norm = config.qk_norm

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
        seen = _causal(x.shape[1], self.window)
        mixed = _attend(q, k, v, seen[None], scale=self.head_dim**-0.5)
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
        seen = _seen_by(positions, keys.shape[2], self.window)
        mixed = _attend(
            q[:, None], keys, values, seen[:, None], scale=self.head_dim**-0.5
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
        by_head = fused.reshape(*x.shape[:-1], -1, self.head_dim)
        q, k, v = jnp.split(by_head, [self.heads, self.heads + self.kv_heads], axis=-2)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *angles), rotate(k, *angles), v


def _attend(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch kv_heads positions head_dim"],
    v: Float[Array, "batch kv_heads positions head_dim"],
    seen: Bool[Array, "#batch time positions"],
    *,
    scale: float,
) -> Float[Array, "batch time heads*head_dim"]:
    """Returns softmax(q k) v per head; scores and softmax in float32."""
    batch, time, heads, head_dim = q.shape
    grouped = q.reshape(batch, time, k.shape[1], -1, head_dim)
    scores = jnp.einsum(
        "btkgd,bksd->bkgts", grouped, k, preferred_element_type=jnp.float32
    )
    scores = jnp.where(seen[:, None, None], scores * scale, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    mixed = jnp.einsum("bkgts,bksd->btkgd", weights, v)
    return mixed.reshape(batch, time, heads * head_dim)


def _causal(time: int, window: int | None) -> Bool[Array, "time time"]:
    """Returns which position (column) each position (row) sees."""
    positions = jnp.arange(time, dtype=jnp.int32)
    return _between(positions, positions, window)


def _seen_by(
    positions: Int[Array, " batch"], length: int, window: int | None
) -> Bool[Array, "batch length"]:
    """Returns which cached position each row sees; an idle row sees the first one.

    An idle row's output is never read; seeing something keeps it free of NaN.
    """
    cached = jnp.arange(length, dtype=jnp.int32)
    return _between(jnp.maximum(positions, 0), cached, window)


def _between(
    own: Int[Array, " rows"], other: Int[Array, " columns"], window: int | None
) -> Bool[Array, "rows columns"]:
    distance = own[:, None] - other[None, :]
    if window is None:
        return distance >= 0
    return (distance >= 0) & (distance < window)
