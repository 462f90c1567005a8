"""A decoder with its language-model head, as users and the serving engine call it."""

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from lora_jax.models.attend import cap, counted_positions
from lora_jax.models.cache import KVCache
from lora_jax.models.config import ModelConfig
from lora_jax.models.decoder import Decoder
from lora_jax.models.gpt2 import GPT2Decoder
from lora_jax.models.head import TiedHead
from lora_jax.models.linear import PACKED_MODULES, plain_linear
from lora_jax.models.names import Naming


class CausalLM(nnx.Module):
    """A decoder with its language-model head.

    Args:
      config: the facts of the model.
      dtype: of parameters and activations; norms, softmax and logits use float32.
      rngs: for random weights; a checkpoint's weights come from `load_model`.

    Attributes:
      packed_modules_mapping: fused module -> the children it replaces (vLLM's name).
      config: static.
      model: `embed_tokens`, `layers` (an `nnx.List`) and `norm`. GPT-2 has instead, as
        in its checkpoints, `transformer`: `wte`, `wpe`, `h` and `ln_f`.
      lm_head: an `nnx.Linear`, or a `TiedHead` if its weights are the embedding table.
    """

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, ...]]] = PACKED_MODULES

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        if config.rotaries:
            self.model = Decoder(config, dtype=dtype, rngs=rngs)
        else:
            self.transformer = GPT2Decoder(config, dtype=dtype, rngs=rngs)
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

    @property
    def body(self) -> Decoder | GPT2Decoder:
        """Returns everything but the head."""
        return self.model if self.config.rotaries else self.transformer

    @classmethod
    def naming(cls, config: ModelConfig) -> Naming:
        """Returns how a checkpoint of `config` may spell its tensors."""
        body, embedding = (
            ("model.", "model.embed_tokens.weight")
            if config.rotaries
            else ("transformer.", "transformer.wte.weight")
        )
        tied = {"lm_head.weight": embedding} if config.tie_word_embeddings else {}
        return Naming(
            left_out=body,
            put_before=(),
            tied=tied,
            unused=(),
            renamed=config.renamed,
        )

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"] | None = None,
    ) -> Float[Array, "batch time vocab"]:
        """Returns float32 logits for every token.

        Args:
          tokens: token ids; padding on the right changes no earlier token.
          positions: for the position embedding only, `0 .. time-1` if not given; a
            token always sees itself and what stands before it in its row.
        """
        if positions is None:
            positions = counted_positions(tokens.shape[1])
        hidden, _ = self.body.prefill(tokens, positions)
        return self.logits(hidden)

    def prefill(
        self, tokens: Int[Array, "batch time"]
    ) -> tuple[Float[Array, "batch time d"], KVCache]:
        """Returns hidden states, and the keys and values of positions `0 .. time-1`.

        Args:
          tokens: prompts padded on the right; what the padding computes is harmless, as
            no earlier token sees it and `decode` overwrites its keys and values.
        """
        return self.body.prefill(tokens, counted_positions(tokens.shape[1]))

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
        return self.body.decode(tokens, positions, cache)

    def logits(
        self, hidden: Float[Array, "*tokens d"]
    ) -> Float[Array, "*tokens vocab"]:
        """Returns the float32 logits of hidden states."""
        if isinstance(self.lm_head, TiedHead):
            raw = self.lm_head(hidden, self.body.embedding)
        else:
            raw = self.lm_head(hidden)
        raw = raw.astype(jnp.float32)
        bound = self.config.logit_softcap
        if bound is None:
            return raw
        # A token that a row does not have is at -inf, which the cap would make legal.
        return jnp.where(jnp.isneginf(raw), raw, cap(raw, bound))
