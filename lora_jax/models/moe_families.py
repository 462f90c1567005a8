"""The families whose tokens choose a few of many feed-forward blocks."""

import dataclasses

from lora_jax.models.dense_families import COMMON, LLAMA, MISTRAL, QWEN2
from lora_jax.models.family import (
    ExpertsFamily,
    Values,
    all_full,
    all_sliding,
    alternates,
    architectures,
    count,
    listed_or,
)

EVERY_LAYER: Values = {
    "moe_intermediate_size": None,
    "mlp_only_layers": None,
    "decoder_sparse_step": 1,
}
"""Every layer has experts, and `intermediate_size` is their width."""

EXPERT_COUNT = {"num_experts": "num_local_experts"}
"""transformers writes either name, whatever the family called it at first."""

_GATED = ExpertsFamily(
    block="gate",
    choice="softmax_top",
    normalized="norm_topk_prob",
    rounded=True,
    activation=None,
    use_bias=False,
    interleaved=False,
    stored_in_out=False,
)


def _even_layers_below(values: Values, layer: int) -> bool:
    return layer % 2 == 0 and layer < count(values, "max_window_layers")


def _qwen2_moe_kinds(values: Values) -> tuple[str, ...]:
    if not values["use_sliding_window"] or not values["sliding_window"]:
        return all_full(values)
    return listed_or(_even_layers_below)(values)


def _qwen3_moe_kinds(values: Values) -> tuple[str, ...]:
    if not values["use_sliding_window"]:
        return all_full(values)
    return all_sliding(values)


MIXTRAL = dataclasses.replace(
    MISTRAL,
    architectures=architectures("Mixtral"),
    defaults={
        **MISTRAL.defaults,
        **EVERY_LAYER,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    spellings=EXPERT_COUNT,
    experts=dataclasses.replace(_GATED, normalized=True, rounded=False),
    renamed={".block_sparse_moe.": ".mlp."},
)
QWEN2_MOE = dataclasses.replace(
    QWEN2,
    architectures=architectures("Qwen2Moe"),
    defaults={
        **QWEN2.defaults,
        **EVERY_LAYER,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    layer_kinds=_qwen2_moe_kinds,
    spellings=EXPERT_COUNT,
    qkv_bias="qkv_bias",
    experts=dataclasses.replace(_GATED, block="shared"),
)
QWEN3_MOE = dataclasses.replace(
    QWEN2,
    architectures=architectures("Qwen3Moe"),
    defaults={
        **QWEN2.defaults,
        **EVERY_LAYER,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "moe_intermediate_size": 768,
    },
    layer_kinds=_qwen3_moe_kinds,
    spellings=EXPERT_COUNT,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="head",
    experts=_GATED,
)
OLMOE = dataclasses.replace(
    LLAMA,
    architectures={"OlmoeForCausalLM": "causal_lm", "OlmoeModel": "none"},
    defaults={
        **LLAMA.defaults,
        **EVERY_LAYER,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    spellings=EXPERT_COUNT,
    mlp_bias=False,
    qk_norm="whole",
    experts=_GATED,
)
GPT_OSS = dataclasses.replace(
    LLAMA,
    architectures=architectures("GptOss"),
    defaults={
        **COMMON,
        **EVERY_LAYER,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": None,
        "num_experts": 128,
        "num_experts_per_tok": 4,
    },
    layer_kinds=listed_or(alternates),
    spellings=EXPERT_COUNT,
    fixed={"swiglu_alpha": (None, 1.702), "swiglu_limit": (None, 7.0)},
    mlp_bias=False,
    norm="rms_wide",
    sinks=True,
    experts=ExpertsFamily(
        block="router",
        choice="top_softmax",
        normalized=False,
        rounded=True,
        activation="swiglu_oai",
        use_bias=True,
        interleaved=True,
        stored_in_out=True,
    ),
)
