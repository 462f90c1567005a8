"""Models that score a text: an encoder or decoder with a classification head.

Each has a `.config` with its `labels`, and is called alike: token ids, a mask and
segments in, one raw float32 score for each label out. The head reads one row per text.
"""

import abc
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from lora_jax.models.config import ModelConfig
from lora_jax.models.decoder import Decoder
from lora_jax.models.encoder import Encoder
from lora_jax.models.encoder_config import EncoderConfig
from lora_jax.models.gpt2 import GPT2Decoder
from lora_jax.models.linear import PACKED_MODULES, plain_linear
from lora_jax.models.names import Naming
from lora_jax.models.pooling import last_pool


class Classifier(nnx.Module, abc.ABC):
    """A model that scores texts."""

    @abc.abstractmethod
    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        mask: Bool[Array, "batch time"],
        token_types: Int[Array, "batch time"] | None = None,
    ) -> Float[Array, "batch labels"]:
        """Returns the raw score of each label, float32.

        Args:
          tokens: token ids, padded on the right.
          mask: which of them are not padding.
          token_types: the segment of each token, 0 if not given; decoders have none
            and leave it.
        """


class DecoderClassifier(Classifier):
    """A decoder whose last token is scored by `score`."""

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, ...]]] = PACKED_MODULES

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        if config.rotaries:
            self.model = Decoder(config, dtype=dtype, rngs=rngs)
        else:
            self.transformer = GPT2Decoder(config, dtype=dtype, rngs=rngs)
        d, labels = config.hidden_size, len(config.labels)
        self.score = plain_linear(d, labels, use_bias=False, dtype=dtype, rngs=rngs)

    @property
    def body(self) -> Decoder | GPT2Decoder:
        """Returns everything but the head."""
        return self.model if self.config.rotaries else self.transformer

    @classmethod
    def naming(cls, config: ModelConfig) -> Naming:
        """Returns how a checkpoint of `config` may spell its tensors."""
        return Naming(
            left_out="", put_before=(), tied={}, unused=(), renamed=config.renamed
        )

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        mask: Bool[Array, "batch time"],
        token_types: Int[Array, "batch time"] | None = None,
    ) -> Float[Array, "batch labels"]:
        """Returns the raw score of each label, float32."""
        del token_types
        hidden = self.body(tokens, mask)
        last = last_pool(hidden, mask).astype(hidden.dtype)
        return self.score(last).astype(jnp.float32)


class BertClassifier(Classifier):
    """BERT whose pooled first token is scored by `classifier`."""

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, ...]]] = (
        Encoder.packed_modules_mapping
    )

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.bert = Encoder(config, dtype=dtype, rngs=rngs)
        d, labels = config.hidden_size, len(config.labels)
        self.classifier = plain_linear(d, labels, use_bias=True, dtype=dtype, rngs=rngs)

    @property
    def body(self) -> Encoder:
        """Returns everything but the head."""
        return self.bert

    @classmethod
    def naming(cls, config: EncoderConfig) -> Naming:
        """Returns how a checkpoint of `config` may spell its tensors."""
        return Naming(left_out="", put_before=(), tied={}, unused=())

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        mask: Bool[Array, "batch time"],
        token_types: Int[Array, "batch time"] | None = None,
    ) -> Float[Array, "batch labels"]:
        """Returns the raw score of each label, float32."""
        hidden = self.bert(tokens, mask, token_types)
        return self.classifier(self.bert.pooled(hidden)).astype(jnp.float32)


class RobertaHead(nnx.Module):
    """Scores the first token through one hidden layer."""

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        d, labels = config.hidden_size, len(config.labels)
        self.dense = plain_linear(d, d, use_bias=True, dtype=dtype, rngs=rngs)
        self.out_proj = plain_linear(d, labels, use_bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, first: Float[Array, "batch d"]) -> Float[Array, "batch labels"]:
        """Returns the raw score of each label."""
        return self.out_proj(jnp.tanh(self.dense(first)))


class RobertaClassifier(Classifier):
    """RoBERTa or XLM-RoBERTa whose first token is scored by `classifier`."""

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, ...]]] = (
        Encoder.packed_modules_mapping
    )

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.roberta = Encoder(config, dtype=dtype, rngs=rngs)
        self.classifier = RobertaHead(config, dtype=dtype, rngs=rngs)

    @property
    def body(self) -> Encoder:
        """Returns everything but the head."""
        return self.roberta

    @classmethod
    def naming(cls, config: EncoderConfig) -> Naming:
        """Returns how a checkpoint of `config` may spell its tensors."""
        return Naming(left_out="", put_before=(), tied={}, unused=())

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        mask: Bool[Array, "batch time"],
        token_types: Int[Array, "batch time"] | None = None,
    ) -> Float[Array, "batch labels"]:
        """Returns the raw score of each label, float32."""
        hidden = self.roberta(tokens, mask, token_types)
        return self.classifier(hidden[:, 0]).astype(jnp.float32)
