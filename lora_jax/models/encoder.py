"""BERT-like encoders: every token sees every other; RoBERTa differs in its positions.

Attribute names are those of the checkpoints (`encoder.layer.0.attention.self.query`),
so that tensors and adapters find their modules by path; query, key and value are fused.
"""

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from lora_jax.models.activations import ACTIVATIONS
from lora_jax.models.attend import attend
from lora_jax.models.encoder_config import EncoderConfig
from lora_jax.models.linear import FusedLinear, plain_embed, plain_linear
from lora_jax.models.names import Naming
from lora_jax.models.norm import LayerNorm


class Embeddings(nnx.Module):
    """Sum of a token's, its position's and its segment's embedding, normed."""

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        d = config.hidden_size
        positions, types = config.max_position_embeddings, config.type_vocab_size
        self.word_embeddings = plain_embed(config.vocab_size, d, dtype=dtype, rngs=rngs)
        self.position_embeddings = plain_embed(positions, d, dtype=dtype, rngs=rngs)
        self.token_type_embeddings = plain_embed(types, d, dtype=dtype, rngs=rngs)
        self.LayerNorm = LayerNorm(d, eps=config.norm_eps, dtype=dtype)
        self.first_position = config.first_position

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        mask: Bool[Array, "batch time"],
        token_types: Int[Array, "batch time"],
    ) -> Float[Array, "batch time d"]:
        """Returns the embeddings; padding takes no positions."""
        before = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
        positions = self.first_position + jnp.maximum(before, 0)
        embedded = (
            self.word_embeddings(tokens)
            + self.token_type_embeddings(token_types)
            + self.position_embeddings(positions)
        )
        return self.LayerNorm(embedded)


class SelfAttention(nnx.Module):
    """Attention of every token to every token that is not padding."""

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        d = config.hidden_size
        self.qkv = FusedLinear(
            d,
            (("query", d), ("key", d), ("value", d)),
            use_bias=True,
            dtype=dtype,
            rngs=rngs,
        )
        self.head_dim = config.head_dim

    def __call__(
        self, x: Float[Array, "batch time d"], mask: Bool[Array, "batch time"]
    ) -> Float[Array, "batch time d"]:
        """Returns the mixed values of the seen tokens."""
        fused = self.qkv(x)
        heads = fused.shape[-1] // self.head_dim
        by_head = fused.reshape(*x.shape[:-1], heads, self.head_dim)
        q, k, v = jnp.split(by_head, 3, axis=-2)
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        # A row of nothing but padding sees itself: its output is finite and unread.
        seen = mask | ~jnp.any(mask, axis=1, keepdims=True)
        scale = self.head_dim**-0.5
        return attend(q, k, v, seen[:, None], scale=scale, softcap=None, sinks=None)


class AddAndNorm(nnx.Module):
    """A linear layer whose output is added to the block's input and normed."""

    def __init__(
        self, d_in: int, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        d = config.hidden_size
        self.dense = plain_linear(d_in, d, use_bias=True, dtype=dtype, rngs=rngs)
        self.LayerNorm = LayerNorm(d, eps=config.norm_eps, dtype=dtype)

    def __call__(
        self, x: Float[Array, "*tokens d_in"], added: Float[Array, "*tokens d"]
    ) -> Float[Array, "*tokens d"]:
        """Returns the normed sum."""
        return self.LayerNorm(self.dense(x) + added)


class AttentionBlock(nnx.Module):
    """Self-attention with what follows it; named as in the checkpoints."""

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.self = SelfAttention(config, dtype=dtype, rngs=rngs)
        self.output = AddAndNorm(config.hidden_size, config, dtype=dtype, rngs=rngs)


class Dense(nnx.Module):
    """Holds one linear layer under the name `dense`, as the checkpoints do."""

    def __init__(self, d_in: int, d_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.dense = plain_linear(d_in, d_out, use_bias=True, dtype=dtype, rngs=rngs)


class EncoderLayer(nnx.Module):
    """Attention and feed-forward block, each added to its input and normed after."""

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        d, width = config.hidden_size, config.intermediate_size
        self.attention = AttentionBlock(config, dtype=dtype, rngs=rngs)
        self.intermediate = Dense(d, width, dtype=dtype, rngs=rngs)
        self.output = AddAndNorm(width, config, dtype=dtype, rngs=rngs)
        self.hidden_act = config.hidden_act

    def __call__(
        self, x: Float[Array, "batch time d"], mask: Bool[Array, "batch time"]
    ) -> Float[Array, "batch time d"]:
        """Returns the layer's output."""
        x = self.attention.output(self.attention.self(x, mask), x)
        wide = ACTIVATIONS[self.hidden_act](self.intermediate.dense(x))
        return self.output(wide, x)


class EncoderStack(nnx.Module):
    """Holds the layers under the name `layer`, as the checkpoints do."""

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.layer = nnx.List(
            EncoderLayer(config, dtype=dtype, rngs=rngs)
            for _ in range(config.num_hidden_layers)
        )


class Encoder(nnx.Module):
    """Embeddings, layers and, if there is one, the pooler that BERT's head reads.

    Args:
      config: the facts of the model.
      dtype: of parameters and activations; norms and softmax use float32.
      rngs: for random weights; a checkpoint's weights come from `load_model`.
    """

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv": ("query", "key", "value")
    }

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        d = config.hidden_size
        self.embeddings = Embeddings(config, dtype=dtype, rngs=rngs)
        self.encoder = EncoderStack(config, dtype=dtype, rngs=rngs)
        if config.has_pooler:
            self.pooler = Dense(d, d, dtype=dtype, rngs=rngs)

    @classmethod
    def naming(cls, config: EncoderConfig) -> Naming:
        """Returns how a checkpoint may spell its tensors."""
        return Naming(
            left_out="",
            put_before=(f"{config.body}.",),
            tied={},
            unused=("cls.", "lm_head."),
        )

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        mask: Bool[Array, "batch time"],
        token_types: Int[Array, "batch time"] | None = None,
    ) -> Float[Array, "batch time d"]:
        """Returns the hidden state of every token.

        Args:
          tokens: token ids, padded on the right.
          mask: which of them are not padding.
          token_types: the segment of each token (a pair has two); 0 if not given.
        """
        if token_types is None:
            token_types = jnp.zeros_like(tokens)
        x = self.embeddings(tokens, mask, token_types)
        for layer in self.encoder.layer:
            x = layer(x, mask)
        return x

    def pooled(self, hidden: Float[Array, "batch time d"]) -> Float[Array, "batch d"]:
        """Returns the first token, transformed: what BERT's classifier reads."""
        return jnp.tanh(self.pooler.dense(hidden[:, 0]))
