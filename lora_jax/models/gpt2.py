"""The body of GPT-2: learned positions, layer norms with biases, a plain feed-forward.

Attribute names are those of its checkpoints (`transformer.h.0.attn.c_attn`), so that
tensors and adapters find their modules by path.
"""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from lora_jax.models.activations import ACTIVATIONS
from lora_jax.models.attend import (
    attend,
    causal_attend,
    counted_positions,
    seen_in_cache,
)
from lora_jax.models.cache import KVCache, write_position
from lora_jax.models.config import ModelConfig
from lora_jax.models.linear import Conv1D, plain_embed
from lora_jax.models.names import Naming
from lora_jax.models.norm import LayerNorm


class GPT2Attention(nnx.Module):
    """Attention without rotary positions; q, k and v are one tensor in the file."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        d = config.hidden_size
        self.c_attn = Conv1D(d, 3 * d, dtype=dtype, rngs=rngs)
        self.c_proj = Conv1D(d, d, dtype=dtype, rngs=rngs)
        self.head_dim = config.head_dim
        self.scale = config.query_scale

    def prefill(
        self, x: Float[Array, "batch time d"]
    ) -> tuple[Float[Array, "batch time d"], Array, Array]:
        """Returns the attention's output and the keys and values of the prompt."""
        q, k, v = self._project(x)
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        mixed = causal_attend(
            q, k, v, window=None, scale=self.scale, softcap=None, sinks=None
        )
        return self.c_proj(mixed), k, v

    def decode(
        self,
        x: Float[Array, "batch d"],
        positions: Int[Array, " batch"],
        keys: Array,
        values: Array,
    ) -> tuple[Float[Array, "batch d"], Array, Array]:
        """Returns the attention's output, and keys and values with each row's own."""
        q, k, v = self._project(x)
        keys = write_position(keys, positions, k)
        values = write_position(values, positions, v)
        seen = seen_in_cache(positions, keys.shape[2], None)
        mixed = attend(
            q[:, None],
            keys,
            values,
            seen,
            scale=self.scale,
            softcap=None,
            sinks=None,
        )
        return self.c_proj(mixed[:, 0]), keys, values

    def _project(
        self, x: Float[Array, "*tokens d"]
    ) -> list[Float[Array, "*tokens heads head_dim"]]:
        fused = self.c_attn(x)
        heads = fused.shape[-1] // self.head_dim
        by_head = fused.reshape(*x.shape[:-1], heads, self.head_dim)
        return jnp.split(by_head, 3, axis=-2)


class GPT2MLP(nnx.Module):
    """`c_proj(act(c_fc(x)))`."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        d, width = config.hidden_size, config.intermediate_size
        self.c_fc = Conv1D(d, width, dtype=dtype, rngs=rngs)
        self.c_proj = Conv1D(width, d, dtype=dtype, rngs=rngs)
        self.hidden_act = config.hidden_act

    def __call__(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        """Returns the block's output, without the residual."""
        return self.c_proj(ACTIVATIONS[self.hidden_act](self.c_fc(x)))


class GPT2Layer(nnx.Module):
    """Attention and feed-forward block, each normed before and added to its input."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        d, eps = config.hidden_size, config.norm_eps
        self.ln_1 = LayerNorm(d, eps=eps, dtype=dtype)
        self.attn = GPT2Attention(config, dtype=dtype, rngs=rngs)
        self.ln_2 = LayerNorm(d, eps=eps, dtype=dtype)
        self.mlp = GPT2MLP(config, dtype=dtype, rngs=rngs)

    def prefill(
        self, x: Float[Array, "batch time d"]
    ) -> tuple[Float[Array, "batch time d"], Array, Array]:
        """Returns the layer's output and its keys and values."""
        mixed, keys, values = self.attn.prefill(self.ln_1(x))
        x = x + mixed
        return x + self.mlp(self.ln_2(x)), keys, values

    def decode(
        self,
        x: Float[Array, "batch d"],
        positions: Int[Array, " batch"],
        keys: Array,
        values: Array,
    ) -> tuple[Float[Array, "batch d"], Array, Array]:
        """Returns the layer's output and its keys and values, with the row's own."""
        mixed, keys, values = self.attn.decode(self.ln_1(x), positions, keys, values)
        x = x + mixed
        return x + self.mlp(self.ln_2(x)), keys, values


class GPT2Decoder(nnx.Module):
    """Everything but the head; alone it is a model that embeds texts."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        d = config.hidden_size
        self.wte = plain_embed(config.vocab_size, d, dtype=dtype, rngs=rngs)
        positions = config.max_position_embeddings
        self.wpe = plain_embed(positions, d, dtype=dtype, rngs=rngs)
        self.h = nnx.List(
            GPT2Layer(config, dtype=dtype, rngs=rngs)
            for _ in range(config.num_hidden_layers)
        )
        self.ln_f = LayerNorm(d, eps=config.norm_eps, dtype=dtype)

    @property
    def embedding(self) -> Float[Array, "vocab d"]:
        """Returns the token embedding's table."""
        return self.wte.embedding[...]

    @classmethod
    def naming(cls, config: ModelConfig) -> Naming:
        """Returns how a checkpoint may spell its tensors."""
        del config
        return Naming(
            left_out="", put_before=("transformer.",), tied={}, unused=("lm_head.",)
        )

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        mask: Bool[Array, "batch time"] | None = None,
        token_types: Int[Array, "batch time"] | None = None,
    ) -> Float[Array, "batch time d"]:
        """Returns the hidden state of every token, as an `Encoder` does.

        Args:
          tokens: token ids, padded on the right.
          mask: which of them are not padding; no token sees what comes after it, so
            padding needs no mask here.
          token_types: decoders know no segments.
        """
        del mask, token_types
        hidden, _ = self.prefill(tokens, counted_positions(tokens.shape[1]))
        return hidden

    def prefill(
        self, tokens: Int[Array, "batch time"], positions: Int[Array, "#batch time"]
    ) -> tuple[Float[Array, "batch time d"], KVCache]:
        """Returns the normed hidden states and every layer's keys and values."""
        x = self.wte(tokens) + self.wpe(positions)
        keys, values = [], []
        for layer in self.h:
            x, k, v = layer.prefill(x)
            keys.append(k)
            values.append(v)
        return self.ln_f(x), KVCache(tuple(keys), tuple(values))

    def decode(
        self,
        tokens: Int[Array, " batch"],
        positions: Int[Array, " batch"],
        cache: KVCache,
    ) -> tuple[Float[Array, "batch d"], KVCache]:
        """Returns the normed hidden states of one token a row, and the longer cache."""
        # An idle row's negative position would look up past the table's end: NaN.
        x = self.wte(tokens) + self.wpe(jnp.maximum(positions, 0))
        keys, values = list(cache.keys), list(cache.values)
        for index, layer in enumerate(self.h):
            x, keys[index], values[index] = layer.decode(
                x, positions, keys[index], values[index]
            )
        return self.ln_f(x), KVCache(tuple(keys), tuple(values))
