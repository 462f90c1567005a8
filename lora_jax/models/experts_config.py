"""The part of a config.json that speaks of experts."""

import dataclasses

from lora_jax.models.activations import ACTIVATIONS
from lora_jax.models.family import ExpertsFamily
from lora_jax.models.reader import Reader


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The facts of a model's experts; the same in every layer that has them.

    Attributes:
      num_experts: experts of a layer.
      num_experts_per_tok: how many of them each token uses.
      intermediate_size: width inside one expert.
      shared_intermediate_size: width of the block that every token uses besides; 0 for
        none.
      layers: which layers have experts; the others have one dense block.
      block, choice, rounded, use_bias, interleaved, stored_in_out: as `ExpertsFamily`.
      normalized: whether the chosen weights are made to sum to one.
      activation: of the experts, a key of `ACTIVATIONS` or `GATES`.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_intermediate_size: int
    layers: tuple[bool, ...]
    block: str
    choice: str
    normalized: bool
    rounded: bool
    activation: str
    use_bias: bool
    interleaved: bool
    stored_in_out: bool


def read_experts(reader: Reader, family: ExpertsFamily) -> ExpertsConfig:
    """Returns the experts that a config asks for.

    Args:
      reader: the whole config, defaults filled in; gets a fault for everything wrong.
      family: what the config leaves unsaid.
    """
    experts = reader.positive("num_experts")
    chosen = reader.positive("num_experts_per_tok")
    if chosen > experts:
        reader.fault(
            f"num_experts_per_tok {chosen} exceeds the number of experts, {experts}"
        )
    width = reader.values.get("moe_intermediate_size")
    key = "intermediate_size" if width is None else "moe_intermediate_size"
    activation = family.activation
    normalized = family.normalized
    return ExpertsConfig(
        num_experts=experts,
        num_experts_per_tok=chosen,
        intermediate_size=reader.positive(key),
        shared_intermediate_size=reader.positive_or(
            "shared_expert_intermediate_size", 0
        ),
        layers=_layers_with_experts(reader),
        block=family.block,
        choice=family.choice,
        normalized=reader.flag(normalized)
        if isinstance(normalized, str)
        else normalized,
        rounded=family.rounded,
        activation=activation
        if activation is not None
        else reader.one_of("hidden_act", tuple(ACTIVATIONS)),
        use_bias=family.use_bias,
        interleaved=family.interleaved,
        stored_in_out=family.stored_in_out,
    )


def _layers_with_experts(reader: Reader) -> tuple[bool, ...]:
    """Returns which layers have experts: every n-th, but for those named as dense."""
    layers = reader.positive("num_hidden_layers")
    step = reader.positive("decoder_sparse_step")
    dense = reader.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(x) is int for x in dense):
        reader.fault(f"mlp_only_layers: found {dense!r}, expected a list of layers")
        dense = []
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
