"""What each `model_type` of Hugging Face means where its config.json says nothing.

One row per family: the defaults of its configuration class, and which facts are fixed
by the architecture instead of by a key. Nothing here was invented: each value is the
one in transformers' `configuration_<model_type>.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping

Values = Mapping[str, object]
Windows = tuple[int | None, ...]

FULL, SLIDING = "full_attention", "sliding_attention"
"""The entries of `layer_types` that this decoder computes."""


@dataclasses.dataclass(frozen=True)
class Family:
    """The unsaid facts of one `model_type`.

    Attributes:
      architectures: class names in `architectures` that this decoder computes.
      defaults: value of each key that config.json may leave out.
      qkv_bias, o_bias, mlp_bias: a fixed fact, or the key that decides.
      qk_norm: whether queries and keys are normed per head.
      windows: gives each layer's window from the completed values.
    """

    architectures: tuple[str, ...]
    defaults: Values
    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool
    windows: Callable[[Values], Windows]


def _count(values: Values, key: str) -> int:
    number = values[key]
    return number if isinstance(number, int) else 0


def _no_windows(values: Values) -> Windows:
    return (None,) * _count(values, "num_hidden_layers")


def _every_layer(values: Values) -> Windows:
    window = _count(values, "sliding_window") or None
    return (window,) * _count(values, "num_hidden_layers")


def _by_layer_type(values: Values) -> Windows:
    """Reads `layer_types`, or derives it as Qwen does: the last layers slide."""
    window = _count(values, "sliding_window") if values["use_sliding_window"] else None
    window = window or None
    layers = range(_count(values, "num_hidden_layers"))
    kinds = values["layer_types"]
    if kinds is None:
        first = _count(values, "max_window_layers")
        return tuple(window if layer >= first else None for layer in layers)
    assert isinstance(kinds, list)
    return tuple(window if kind == SLIDING else None for kind in kinds)


_COMMON: Values = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "head_dim": None,
}
_QWEN: Values = {
    **_COMMON,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architectures=("LlamaForCausalLM",),
        defaults={
            **_COMMON,
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "attention_bias": False,
            "mlp_bias": False,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        qk_norm=False,
        windows=_no_windows,
    ),
    "mistral": Family(
        architectures=("MistralForCausalLM",),
        defaults={
            **_COMMON,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=_every_layer,
    ),
    "qwen2": Family(
        architectures=("Qwen2ForCausalLM",),
        defaults=_QWEN,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=_by_layer_type,
    ),
    "qwen3": Family(
        architectures=("Qwen3ForCausalLM",),
        defaults={**_QWEN, "head_dim": 128, "attention_bias": False},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias=False,
        qk_norm=True,
        windows=_by_layer_type,
    ),
}
"""The `model_type`s that can be loaded."""
