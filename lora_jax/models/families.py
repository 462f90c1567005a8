"""What each `model_type` of Hugging Face means where its config.json says nothing.

One row per family: the defaults of its configuration class, its own spellings of common
keys, and which facts are fixed by the architecture instead of by a key. Nothing here
was invented: each value is the one in transformers' `configuration_<model_type>.py`
and `modeling_<model_type>.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping

Values = Mapping[str, object]

FULL, SLIDING = "full_attention", "sliding_attention"
"""The entries of `layer_types` that a decoder layer can be."""

ROTARY_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
"""The kinds of rotary scaling that most families may name."""


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
      qk_norm: whether queries and keys are normed per head.
      norm: a key of `lora_jax.models.norm.NORMS`.
      sandwich_norms: whether a block's output is normed as well as its input.
      scaled_embedding: whether embeddings are multiplied by sqrt(hidden_size).
      fused_tensors: whether the checkpoint itself holds qkv and gate_up as one.
      rotary_kinds: the kinds of rotary scaling that are computed; none of them means
        that positions have a learned embedding.
    """

    architectures: Mapping[str, str]
    defaults: Values
    layer_kinds: Callable[[Values], tuple[str, ...]]
    spellings: Mapping[str, str]
    fixed: Mapping[str, tuple[object, ...]]
    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool
    norm: str
    sandwich_norms: bool
    scaled_embedding: bool
    fused_tensors: bool
    rotary_kinds: tuple[str, ...]


def _architectures(name: str) -> dict[str, str]:
    return {
        f"{name}ForCausalLM": "causal_lm",
        f"{name}ForSequenceClassification": "classifier",
        f"{name}Model": "none",
    }


def _count(values: Values, key: str) -> int:
    number = values[key]
    return number if isinstance(number, int) else 0


def _all_full(values: Values) -> tuple[str, ...]:
    return (FULL,) * _count(values, "num_hidden_layers")


def _all_sliding(values: Values) -> tuple[str, ...]:
    kind = SLIDING if values["sliding_window"] else FULL
    return (kind,) * _count(values, "num_hidden_layers")


def _listed_or(
    derive: Callable[[Values, int], bool],
) -> Callable[[Values], tuple[str, ...]]:
    """Reads `layer_types`, or asks `derive` which layers slide."""

    def layer_kinds(values: Values) -> tuple[str, ...]:
        listed = values["layer_types"]
        if isinstance(listed, list):
            return tuple(str(kind) for kind in listed)
        layers = range(_count(values, "num_hidden_layers"))
        return tuple(SLIDING if derive(values, layer) else FULL for layer in layers)

    return layer_kinds


def _qwen_slides(values: Values, layer: int) -> bool:
    return layer >= _count(values, "max_window_layers")


def _qwen_kinds(values: Values) -> tuple[str, ...]:
    """Qwen looks at windows only where `use_sliding_window` says so."""
    if not values["use_sliding_window"] or not values["sliding_window"]:
        return _all_full(values)
    return _listed_or(_qwen_slides)(values)


def _gemma2_slides(_: Values, layer: int) -> bool:
    return layer % 2 == 0


def _gemma3_slides(values: Values, layer: int) -> bool:
    return (layer + 1) % (_count(values, "sliding_window_pattern") or 6) != 0


_COMMON: Values = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "head_dim": None,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_LLAMA = Family(
    architectures=_architectures("Llama"),
    defaults={
        **_COMMON,
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "attention_bias": False,
        "mlp_bias": False,
    },
    layer_kinds=_all_full,
    spellings={},
    fixed={},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    qk_norm=False,
    norm="rms",
    sandwich_norms=False,
    scaled_embedding=False,
    fused_tensors=False,
    rotary_kinds=ROTARY_KINDS,
)
_MISTRAL = dataclasses.replace(
    _LLAMA,
    architectures=_architectures("Mistral"),
    defaults={
        **_COMMON,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    layer_kinds=_all_sliding,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
)
_QWEN2 = dataclasses.replace(
    _MISTRAL,
    architectures=_architectures("Qwen2"),
    defaults={
        **_COMMON,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    },
    layer_kinds=_qwen_kinds,
    qkv_bias=True,
)
_QWEN3 = dataclasses.replace(
    _QWEN2,
    architectures=_architectures("Qwen3"),
    defaults={**_QWEN2.defaults, "head_dim": 128, "attention_bias": False},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
)
_PHI3 = dataclasses.replace(
    _MISTRAL,
    architectures=_architectures("Phi3"),
    defaults={
        **_COMMON,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_key_value_heads": None,
        "sliding_window": None,
    },
    fused_tensors=True,
    # transformers reads the kind "yarn" of a Phi-3 as longrope.
    rotary_kinds=("default", "longrope"),
)
_GEMMA2 = dataclasses.replace(
    _LLAMA,
    architectures=_architectures("Gemma2"),
    defaults={
        **_COMMON,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_bias": False,
        "sliding_window": 4096,
        "layer_types": None,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    layer_kinds=_listed_or(_gemma2_slides),
    spellings={"hidden_act": "hidden_activation"},
    fixed={"use_bidirectional_attention": (None, False)},
    mlp_bias=False,
    norm="rms_offset",
    sandwich_norms=True,
    scaled_embedding=True,
)
_GEMMA3 = dataclasses.replace(
    _GEMMA2,
    architectures={
        "Gemma3ForCausalLM": "causal_lm",
        "Gemma3TextForSequenceClassification": "classifier",
        "Gemma3TextModel": "none",
    },
    defaults={
        **_GEMMA2.defaults,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    layer_kinds=_listed_or(_gemma3_slides),
    # transformers 5.24 declares the first of these and does not use it.
    fixed={**_GEMMA2.fixed, "attn_logit_softcapping": (None,)},
    qk_norm=True,
)
_GPT2 = dataclasses.replace(
    _LLAMA,
    architectures={
        "GPT2LMHeadModel": "causal_lm",
        "GPT2ForSequenceClassification": "classifier",
        "GPT2Model": "none",
    },
    defaults={
        **_COMMON,
        "hidden_act": "gelu_new",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
        "num_key_value_heads": None,
        "intermediate_size": None,
    },
    spellings={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    fixed={
        "scale_attn_weights": (True, None),
        "scale_attn_by_inverse_layer_idx": (False, None),
        "add_cross_attention": (False, None),
    },
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    norm="layer",
    fused_tensors=True,
    rotary_kinds=(),
)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "phi3": _PHI3,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gpt2": _GPT2,
}
"""The `model_type`s of decoders that can be loaded."""
