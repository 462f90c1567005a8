"""The decoder: embedding, layers, final norm, head; as a Flax NNX module.

One implementation for every family of `lora_jax.models.families`: the config says
which parts a layer has. Attribute names are Hugging Face's, so a module's path here is
its path there (`model.layers.0.self_attn.o_proj`), except that q, k, v and gate, up are
fused.
"""

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from lora_jax.models.attention import Angles, Attention
from lora_jax.models.cache import KVCache
from lora_jax.models.config import ModelConfig
from lora_jax.models.head import TiedHead
from lora_jax.models.linear import plain_linear
from lora_jax.models.mlp import GatedMLP
from lora_jax.models.norm import RMSNorm
from lora_jax.models.rotary import rotary_angles


class DecoderLayer(nnx.Module):
    """Attention and feed-forward block, each normed before and added to its input."""

    def __init__(
        self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(d, eps=eps, dtype=dtype)
        self.self_attn = Attention(
            config, window=config.windows[layer], dtype=dtype, rngs=rngs
        )
        self.post_attention_layernorm = RMSNorm(d, eps=eps, dtype=dtype)
        self.mlp = GatedMLP(config, dtype=dtype, rngs=rngs)

    def prefill(
        self, x: Float[Array, "batch time d"], angles: Angles
    ) -> tuple[Float[Array, "batch time d"], Array, Array]:
        """Returns the layer's output and its keys and values."""
        mixed, keys, values = self.self_attn.prefill(self.input_layernorm(x), angles)
        return self._feed_forward(x + mixed), keys, values

    def decode(
        self,
        x: Float[Array, "batch d"],
        angles: Angles,
        positions: Int[Array, " batch"],
        keys: Array,
        values: Array,
    ) -> tuple[Float[Array, "batch d"], Array, Array]:
        """Returns the layer's output and its keys and values, with the row's own."""
        mixed, keys, values = self.self_attn.decode(
            self.input_layernorm(x), angles, positions, keys, values
        )
        return self._feed_forward(x + mixed), keys, values

    def _feed_forward(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """Everything but the head."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=jnp.dtype(dtype),
            param_dtype=jnp.dtype(dtype),
            rngs=rngs,
        )
        self.layers = nnx.List(
            DecoderLayer(config, layer, dtype=dtype, rngs=rngs)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.rotary = config.rotary

    def prefill(
        self, tokens: Int[Array, "batch time"], positions: Int[Array, "#batch time"]
    ) -> tuple[Float[Array, "batch time d"], KVCache]:
        """Returns the normed hidden states and every layer's keys and values."""
        angles = rotary_angles(self.rotary, positions)
        x, keys, values = self.embed_tokens(tokens), [], []
        for layer in self.layers:
            x, k, v = layer.prefill(x, angles)
            keys.append(k)
            values.append(v)
        return self.norm(x), KVCache(tuple(keys), tuple(values))

    def decode(
        self,
        tokens: Int[Array, " batch"],
        positions: Int[Array, " batch"],
        cache: KVCache,
    ) -> tuple[Float[Array, "batch d"], KVCache]:
        """Returns the normed hidden states of one token a row, and the longer cache."""
        angles = rotary_angles(self.rotary, positions)
        x, keys, values = self.embed_tokens(tokens), [], []
        for index, layer in enumerate(self.layers):
            x, k, v = layer.decode(
                x, angles, positions, cache.keys[index], cache.values[index]
            )
            keys.append(k)
            values.append(v)
        return self.norm(x), KVCache(tuple(keys), tuple(values))


class CausalLM(nnx.Module):
    """A decoder with its language-model head.

    Args:
      config: the facts of the model.
      dtype: of parameters and activations; norms, softmax and logits use float32.
      rngs: for random weights; a checkpoint's weights come from `load_model`.

    Attributes:
      packed_modules_mapping: fused module -> the children it replaces (vLLM's name).
      config: static.
      model: `embed_tokens`, `layers` (an `nnx.List`) and `norm`.
      lm_head: an `nnx.Linear`, or a `TiedHead` if its weights are the embedding table.
    """

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.model = Decoder(config, dtype=dtype, rngs=rngs)
        if config.tie_word_embeddings:
            self.lm_head = TiedHead(config.hidden_size, config.vocab_size)
        else:
            self.lm_head = plain_linear(
                config.hidden_size,
                config.vocab_size,
                use_bias=False,
                dtype=dtype,
                rngs=rngs,
            )

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"] | None = None,
    ) -> Float[Array, "batch time vocab"]:
        """Returns float32 logits for every token.

        Args:
          tokens: token ids; padding on the right changes no earlier token.
          positions: for the rotary embedding only, `0 .. time-1` if not given; a token
            always sees itself and what stands before it in its row.
        """
        if positions is None:
            positions = _counted(tokens.shape[1])
        hidden, _ = self.model.prefill(tokens, positions)
        return self.logits(hidden)

    def prefill(
        self, tokens: Int[Array, "batch time"]
    ) -> tuple[Float[Array, "batch time d"], KVCache]:
        """Returns hidden states, and the keys and values of positions `0 .. time-1`.

        Args:
          tokens: prompts padded on the right; what the padding computes is harmless, as
            no earlier token sees it and `decode` overwrites its keys and values.
        """
        return self.model.prefill(tokens, _counted(tokens.shape[1]))

    def decode(
        self,
        tokens: Int[Array, " batch"],
        positions: Int[Array, " batch"],
        cache: KVCache,
    ) -> tuple[Float[Array, "batch d"], KVCache]:
        """Returns the hidden state of one more token a row, and the cache with it.

        Args:
          tokens: the next token of each row.
          positions: its position; a row with a negative one is idle: it writes nothing
            and its hidden state means nothing.
          cache: may be donated; it is then written in place.
        """
        return self.model.decode(tokens, positions, cache)

    def logits(
        self, hidden: Float[Array, "*tokens d"]
    ) -> Float[Array, "*tokens vocab"]:
        """Returns the float32 logits of hidden states."""
        if isinstance(self.lm_head, TiedHead):
            raw = self.lm_head(hidden, self.model.embed_tokens.embedding[...])
        else:
            raw = self.lm_head(hidden)
        return raw.astype(jnp.float32)


def _counted(time: int) -> Int[Array, "1 time"]:
    return jax.lax.broadcasted_iota(jnp.int32, (1, time), 1)
