"""What a row of the families table says: the facts that a config.json leaves unsaid.

Also the ways in which a family may say which layers look at a window only.
"""

import dataclasses
from collections.abc import Callable, Mapping

Values = Mapping[str, object]

FULL, SLIDING = "full_attention", "sliding_attention"
"""The entries of `layer_types` that a decoder layer can be."""

ROTARY_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
"""The kinds of rotary scaling that most families may name."""


@dataclasses.dataclass(frozen=True)
class ExpertsFamily:
    """How the experts of a family differ from those of others.

    Attributes:
      block: a key of `lora_jax.models.moe_block.BLOCKS`.
      choice: a key of `lora_jax.models.router.CHOICES`.
      normalized: whether the chosen weights are made to sum to one; a fixed fact, or
        the key that decides.
      rounded: whether weights are rounded to the model's dtype.
      activation: of the experts, `None` if `hidden_act` says it.
      use_bias: whether experts add biases.
      interleaved, stored_in_out: how the checkpoint stores them, see `ExpertLinear`.
    """

    block: str
    choice: str
    normalized: bool | str
    rounded: bool
    activation: str | None
    use_bias: bool
    interleaved: bool
    stored_in_out: bool


@dataclasses.dataclass(frozen=True)
class Family:
    """The unsaid facts of one `model_type`.

    Attributes:
      architectures: class name in `architectures` -> `ModelConfig.head`.
      defaults: value of each key that config.json may leave out, in common spelling.
      spellings: common key -> the family's own key for it.
      fixed: key -> the values that are computed; any other is refused.
      layer_kinds: gives each layer's kind from the completed values.
      qkv_bias, o_bias, mlp_bias: a fixed fact, or the key that decides.
      qk_norm: whether queries and keys are normed, each head for itself (`"head"`)
        or all heads together (`"whole"`); `None` for no norm.
      sinks: whether each head has a score of its own for attending to nothing.
      norm: a key of `lora_jax.models.norm.NORMS`.
      sandwich_norms: whether a block's output is normed as well as its input.
      scaled_embedding: whether embeddings are multiplied by sqrt(hidden_size).
      fused_tensors: whether the checkpoint itself holds qkv and gate_up as one.
      rotary_kinds: the kinds of rotary scaling that are computed; none of them means
        that positions have a learned embedding.
      experts: what is special about experts; `None` if there are none.
      renamed: what a checkpoint may write -> what the model's path says.
    """

    architectures: Mapping[str, str]
    defaults: Values
    layer_kinds: Callable[[Values], tuple[str, ...]]
    spellings: Mapping[str, str]
    fixed: Mapping[str, tuple[object, ...]]
    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    qk_norm: str | None
    sinks: bool
    norm: str
    sandwich_norms: bool
    scaled_embedding: bool
    fused_tensors: bool
    rotary_kinds: tuple[str, ...]
    experts: ExpertsFamily | None
    renamed: Mapping[str, str]


def architectures(name: str) -> dict[str, str]:
    """Returns the three classes that a family usually has, and their heads."""
    return {
        f"{name}ForCausalLM": "causal_lm",
        f"{name}ForSequenceClassification": "classifier",
        f"{name}Model": "none",
    }


def count(values: Values, key: str) -> int:
    """Returns a whole number; 0 for what the reader will refuse."""
    number = values[key]
    return number if isinstance(number, int) else 0


def all_full(values: Values) -> tuple[str, ...]:
    """Returns no windows at all."""
    return (FULL,) * count(values, "num_hidden_layers")


def all_sliding(values: Values) -> tuple[str, ...]:
    """Returns windows in every layer if the config has a window."""
    kind = SLIDING if values["sliding_window"] else FULL
    return (kind,) * count(values, "num_hidden_layers")


def listed_or(
    derive: Callable[[Values, int], bool],
) -> Callable[[Values], tuple[str, ...]]:
    """Reads `layer_types`, or asks `derive` which layers slide."""

    def layer_kinds(values: Values) -> tuple[str, ...]:
        listed = values["layer_types"]
        if isinstance(listed, list):
            return tuple(str(kind) for kind in listed)
        layers = range(count(values, "num_hidden_layers"))
        return tuple(SLIDING if derive(values, layer) else FULL for layer in layers)

    return layer_kinds


def qwen_slides(values: Values, layer: int) -> bool:
    """Returns whether a layer is one of the last, from `max_window_layers` on."""
    return layer >= count(values, "max_window_layers")


def qwen_kinds(values: Values) -> tuple[str, ...]:
    """Qwen looks at windows only where `use_sliding_window` says so."""
    if not values["use_sliding_window"] or not values["sliding_window"]:
        return all_full(values)
    return listed_or(qwen_slides)(values)


def alternates(_: Values, layer: int) -> bool:
    """Returns whether a layer is one of every other, from the first on."""
    return layer % 2 == 0


def gemma3_slides(values: Values, layer: int) -> bool:
    """Returns whether a layer is none of every `sliding_window_pattern`-th."""
    return (layer + 1) % (count(values, "sliding_window_pattern") or 6) != 0
