"""Feed-forward blocks with experts: a router, its experts, and what stands beside them.

Kinds differ in what the router is called in the checkpoint, whether it has a bias, and
whether there is an expert that every token uses. Any shape of tokens becomes rows.
"""

import abc
from collections.abc import Mapping

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lora_jax.models.config import ModelConfig
from lora_jax.models.experts import Experts
from lora_jax.models.experts_config import ExpertsConfig
from lora_jax.models.linear import plain_linear
from lora_jax.models.mlp import GatedMLP
from lora_jax.models.router import choose


class MoEBlock(nnx.Module, abc.ABC):
    """What every kind of block is for the layer that holds it.

    Args:
      config: the facts of the model.
      facts: the facts of its experts.
      dtype, rngs: as in the other layers.
    """

    experts: Experts

    @abc.abstractmethod
    def __init__(
        self,
        config: ModelConfig,
        facts: ExpertsConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ): ...

    @abc.abstractmethod
    def mixed(self, rows: Float[Array, "tokens d"]) -> Float[Array, "tokens d"]:
        """Returns the block's output for each row."""

    def __call__(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        """Returns the block's output, without the residual."""
        return self.mixed(x.reshape(-1, x.shape[-1])).reshape(x.shape)


class GateBlock(MoEBlock):
    """A router without a bias, called `gate`: Mixtral, Qwen3-MoE, OLMoE."""

    def __init__(
        self,
        config: ModelConfig,
        facts: ExpertsConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.facts = facts
        self.gate = _router(config, facts, use_bias=False, dtype=dtype, rngs=rngs)
        self.experts = _experts(config, facts, dtype=dtype, rngs=rngs)

    def mixed(self, rows: Float[Array, "tokens d"]) -> Float[Array, "tokens d"]:
        """Returns the sum of each row's experts."""
        return self.experts(rows, *choose(self.gate(rows), self.facts))


class SharedExpertBlock(GateBlock):
    """As `GateBlock`, and a gated expert that every token uses: Qwen2-MoE."""

    def __init__(
        self,
        config: ModelConfig,
        facts: ExpertsConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, facts, dtype=dtype, rngs=rngs)
        width = facts.shared_intermediate_size
        self.shared_expert = GatedMLP(config, width, dtype=dtype, rngs=rngs)
        self.shared_expert_gate = plain_linear(
            config.hidden_size, 1, use_bias=False, dtype=dtype, rngs=rngs
        )

    def mixed(self, rows: Float[Array, "tokens d"]) -> Float[Array, "tokens d"]:
        """Returns the sum of each row's experts and its share of the shared one."""
        routed = super().mixed(rows)
        share = jax.nn.sigmoid(self.shared_expert_gate(rows))
        return routed + share * self.shared_expert(rows)


class RouterBlock(MoEBlock):
    """A router with a bias, called `router`: gpt-oss."""

    def __init__(
        self,
        config: ModelConfig,
        facts: ExpertsConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.facts = facts
        self.router = _router(config, facts, use_bias=True, dtype=dtype, rngs=rngs)
        self.experts = _experts(config, facts, dtype=dtype, rngs=rngs)

    def mixed(self, rows: Float[Array, "tokens d"]) -> Float[Array, "tokens d"]:
        """Returns the sum of each row's experts."""
        return self.experts(rows, *choose(self.router(rows), self.facts))


BLOCKS: Mapping[str, type[MoEBlock]] = {
    "gate": GateBlock,
    "shared": SharedExpertBlock,
    "router": RouterBlock,
}
"""The values of `ExpertsConfig.block`."""


def _router(
    config: ModelConfig,
    facts: ExpertsConfig,
    *,
    use_bias: bool,
    dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    return plain_linear(
        config.hidden_size,
        facts.num_experts,
        use_bias=use_bias,
        dtype=dtype,
        rngs=rngs,
    )


def _experts(
    config: ModelConfig, facts: ExpertsConfig, *, dtype: DTypeLike, rngs: nnx.Rngs
) -> Experts:
    return Experts(
        facts.num_experts,
        config.hidden_size,
        facts.intermediate_size,
        gated=True,
        activation=facts.activation,
        use_bias=facts.use_bias,
        interleaved=facts.interleaved,
        stored_in_out=facts.stored_in_out,
        dtype=dtype,
        rngs=rngs,
    )
