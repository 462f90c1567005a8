"""The body of Llama-like decoders: embedding, layers, final norm.

One implementation for every family of `lora_jax.models.families` but GPT-2: the
config says which parts a layer has. Attribute names are Hugging Face's, so a module's
path here is its path there (`model.layers.0.self_attn.o_proj`), except that q, k, v and
gate, up are fused.
"""

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from lora_jax.models.attend import counted_positions
from lora_jax.models.attention import Angles
from lora_jax.models.cache import KVCache
from lora_jax.models.config import ModelConfig
from lora_jax.models.layer import PreNormLayer, SandwichNormLayer
from lora_jax.models.linear import PACKED_MODULES, plain_embed
from lora_jax.models.names import Naming
from lora_jax.models.norm import NORMS
from lora_jax.models.rotary import Rotary, rotary_angles


class Decoder(nnx.Module):
    """Everything but the head; alone it is a model that embeds texts.

    Args:
      config: the facts of the model.
      dtype: of parameters and activations; norms and softmax use float32.
      rngs: for random weights; a checkpoint's weights come from `load_model`.
    """

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, ...]]] = PACKED_MODULES

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        kind = SandwichNormLayer if config.sandwich_norms else PreNormLayer
        self.embed_tokens = plain_embed(
            config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs
        )
        self.layers = nnx.List(
            kind(
                config,
                window=window,
                with_experts=with_experts,
                dtype=dtype,
                rngs=rngs,
            )
            for window, with_experts in zip(
                config.windows, config.layers_with_experts, strict=True
            )
        )
        self.norm = NORMS[config.norm](
            config.hidden_size, eps=config.norm_eps, dtype=dtype
        )

    @property
    def embedding(self) -> Float[Array, "vocab d"]:
        """Returns the token embedding's table."""
        return self.embed_tokens.embedding[...]

    @classmethod
    def naming(cls, config: ModelConfig) -> Naming:
        """Returns how a checkpoint may spell its tensors."""
        return Naming(
            left_out="",
            put_before=("model.",),
            tied={},
            unused=("lm_head.",),
            renamed=config.renamed,
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
        x, angles = self._embed(tokens), self._angles(positions)
        keys, values = [], []
        for layer, rotary in zip(self.layers, self.config.rotaries, strict=True):
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
        layers = zip(self.layers, self.config.rotaries, strict=True)
        for index, (layer, rotary) in enumerate(layers):
            x, keys[index], values[index] = layer.decode(
                x, angles[rotary], positions, keys[index], values[index]
            )
        return self.norm(x), KVCache(tuple(keys), tuple(values))

    def _embed(self, tokens: Int[Array, "*tokens"]) -> Float[Array, "*tokens d"]:
        embedded = self.embed_tokens(tokens)
        # Gemma rounds the factor to the model's dtype: sqrt(3072) is 55.5 in bfloat16.
        return embedded * jnp.asarray(self.config.embedding_scale, embedded.dtype)

    def _angles(self, positions: Int[Array, "*tokens"]) -> dict[Rotary, Angles]:
        """Returns the angles of each distinct rotary embedding, made once a step."""
        distinct = dict.fromkeys(self.config.rotaries)
        return {rotary: rotary_angles(rotary, positions) for rotary in distinct}
