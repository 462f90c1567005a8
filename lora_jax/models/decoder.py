"""The body of Llama-like decoders: embedding, layers, final norm.

One implementation for every family of `lora_jax.models.families` but GPT-2: the
config says which parts a layer has. Attribute names are Hugging Face's, so a module's
path here is its path there (`model.layers.0.self_attn.o_proj`), except that q, k, v and
gate, up are fused.
"""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from lora_jax.models.attention import Angles
from lora_jax.models.cache import KVCache
from lora_jax.models.config import ModelConfig
from lora_jax.models.layer import PreNormLayer, SandwichNormLayer
from lora_jax.models.linear import plain_embed
from lora_jax.models.norm import NORMS
from lora_jax.models.rotary import Rotary, rotary_angles


class Decoder(nnx.Module):
    """Everything but the head."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        kind = SandwichNormLayer if config.sandwich_norms else PreNormLayer
        self.embed_tokens = plain_embed(
            config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs
        )
        self.layers = nnx.List(
            kind(config, window=window, dtype=dtype, rngs=rngs)
            for window in config.windows
        )
        self.norm = NORMS[config.norm](
            config.hidden_size, eps=config.norm_eps, dtype=dtype
        )
        self.rotaries = config.rotaries
        self.embedding_scale = config.embedding_scale

    @property
    def embedding(self) -> Float[Array, "vocab d"]:
        """Returns the token embedding's table."""
        return self.embed_tokens.embedding[...]

    def prefill(
        self, tokens: Int[Array, "batch time"], positions: Int[Array, "#batch time"]
    ) -> tuple[Float[Array, "batch time d"], KVCache]:
        """Returns the normed hidden states and every layer's keys and values."""
        x, angles = self._embed(tokens), self._angles(positions)
        keys, values = [], []
        for layer, rotary in zip(self.layers, self.rotaries, strict=True):
            x, k, v = layer.prefill(x, angles[rotary])
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
        x, angles = self._embed(tokens), self._angles(positions)
        keys, values = list(cache.keys), list(cache.values)
        for index, layer in enumerate(self.layers):
            x, keys[index], values[index] = layer.decode(
                x, angles[self.rotaries[index]], positions, keys[index], values[index]
            )
        return self.norm(x), KVCache(tuple(keys), tuple(values))

    def _embed(self, tokens: Int[Array, "*tokens"]) -> Float[Array, "*tokens d"]:
        embedded = self.embed_tokens(tokens)
        # Gemma rounds the factor to the model's dtype: sqrt(3072) is 55.5 in bfloat16.
        return embedded * jnp.asarray(self.embedding_scale, embedded.dtype)

    def _angles(self, positions: Int[Array, "*tokens"]) -> dict[Rotary, Angles]:
        """Returns the angles of each distinct rotary embedding, made once a step."""
        distinct = dict.fromkeys(self.rotaries)
        return {rotary: rotary_angles(rotary, positions) for rotary in distinct}
