"""One decoder layer: attention and feed-forward block, with their norms."""

import abc

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from lora_jax.models.attention import Angles, Attention
from lora_jax.models.config import ModelConfig
from lora_jax.models.mlp import GatedMLP
from lora_jax.models.moe_block import BLOCKS, MoEBlock
from lora_jax.models.norm import NORMS


class DecoderLayer(nnx.Module, abc.ABC):
    """What every kind of layer offers the decoder; kinds differ in their norms."""

    self_attn: Attention

    @abc.abstractmethod
    def before_attention(
        self, x: Float[Array, "*tokens d"]
    ) -> Float[Array, "*tokens d"]:
        """Returns what the attention reads."""

    @abc.abstractmethod
    def after_attention(
        self, x: Float[Array, "*tokens d"], mixed: Float[Array, "*tokens d"]
    ) -> Float[Array, "*tokens d"]:
        """Returns the layer's output from its input and the attention's output."""

    def prefill(
        self, x: Float[Array, "batch time d"], angles: Angles
    ) -> tuple[Float[Array, "batch time d"], Array, Array]:
        """Returns the layer's output and its keys and values."""
        mixed, keys, values = self.self_attn.prefill(self.before_attention(x), angles)
        return self.after_attention(x, mixed), keys, values

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
            self.before_attention(x), angles, positions, keys, values
        )
        return self.after_attention(x, mixed), keys, values


class PreNormLayer(DecoderLayer):
    """Each block reads its normed input and adds to it: Llama's layer."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        window: int | None,
        with_experts: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        norm, d, eps = NORMS[config.norm], config.hidden_size, config.norm_eps
        self.input_layernorm = norm(d, eps=eps, dtype=dtype)
        self.self_attn = Attention(config, window=window, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = norm(d, eps=eps, dtype=dtype)
        self.mlp = feed_forward(config, with_experts, dtype=dtype, rngs=rngs)

    def before_attention(
        self, x: Float[Array, "*tokens d"]
    ) -> Float[Array, "*tokens d"]:
        """Returns the normed input."""
        return self.input_layernorm(x)

    def after_attention(
        self, x: Float[Array, "*tokens d"], mixed: Float[Array, "*tokens d"]
    ) -> Float[Array, "*tokens d"]:
        """Adds the attention's output, then the feed-forward block's."""
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x))


class SandwichNormLayer(DecoderLayer):
    """Each block's output is normed too, before it is added: Gemma 2 and 3."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        window: int | None,
        with_experts: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        norm, d, eps = NORMS[config.norm], config.hidden_size, config.norm_eps
        self.input_layernorm = norm(d, eps=eps, dtype=dtype)
        self.self_attn = Attention(config, window=window, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = norm(d, eps=eps, dtype=dtype)
        self.pre_feedforward_layernorm = norm(d, eps=eps, dtype=dtype)
        self.mlp = feed_forward(config, with_experts, dtype=dtype, rngs=rngs)
        self.post_feedforward_layernorm = norm(d, eps=eps, dtype=dtype)

    def before_attention(
        self, x: Float[Array, "*tokens d"]
    ) -> Float[Array, "*tokens d"]:
        """Returns the normed input."""
        return self.input_layernorm(x)

    def after_attention(
        self, x: Float[Array, "*tokens d"], mixed: Float[Array, "*tokens d"]
    ) -> Float[Array, "*tokens d"]:
        """Adds the attention's normed output, then the feed-forward block's."""
        x = x + self.post_attention_layernorm(mixed)
        fed = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(fed)


def feed_forward(
    config: ModelConfig, with_experts: bool, *, dtype: DTypeLike, rngs: nnx.Rngs
) -> GatedMLP | MoEBlock:
    """Returns the feed-forward block of a layer, random."""
    if config.experts is None or not with_experts:
        width = config.intermediate_size
        return GatedMLP(config, width, dtype=dtype, rngs=rngs)
    return BLOCKS[config.experts.block](config, config.experts, dtype=dtype, rngs=rngs)
