"""The families whose feed-forward blocks every token uses."""

import dataclasses

from lora_jax.models.family import (
    ROTARY_KINDS,
    Family,
    Values,
    all_full,
    all_sliding,
    alternates,
    architectures,
    gemma3_slides,
    listed_or,
    qwen_kinds,
)

COMMON: Values = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "head_dim": None,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "clip_qkv": None,
}
LLAMA = Family(
    architectures=architectures("Llama"),
    defaults={
        **COMMON,
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "attention_bias": False,
        "mlp_bias": False,
    },
    layer_kinds=all_full,
    spellings={},
    fixed={},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    qk_norm=None,
    sinks=False,
    norm="rms",
    sandwich_norms=False,
    scaled_embedding=False,
    fused_tensors=False,
    rotary_kinds=ROTARY_KINDS,
    experts=None,
    renamed={},
)
MISTRAL = dataclasses.replace(
    LLAMA,
    architectures=architectures("Mistral"),
    defaults={
        **COMMON,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    layer_kinds=all_sliding,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
)
QWEN2 = dataclasses.replace(
    MISTRAL,
    architectures=architectures("Qwen2"),
    defaults={
        **COMMON,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    },
    layer_kinds=qwen_kinds,
    qkv_bias=True,
)
QWEN3 = dataclasses.replace(
    QWEN2,
    architectures=architectures("Qwen3"),
    defaults={**QWEN2.defaults, "head_dim": 128, "attention_bias": False},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="head",
)
PHI3 = dataclasses.replace(
    MISTRAL,
    architectures=architectures("Phi3"),
    defaults={
        **COMMON,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_key_value_heads": None,
        "sliding_window": None,
    },
    fused_tensors=True,
    # transformers reads the kind "yarn" of a Phi-3 as longrope.
    rotary_kinds=("default", "longrope"),
)
GEMMA2 = dataclasses.replace(
    LLAMA,
    architectures=architectures("Gemma2"),
    defaults={
        **COMMON,
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
    layer_kinds=listed_or(alternates),
    spellings={"hidden_act": "hidden_activation"},
    fixed={"use_bidirectional_attention": (None, False)},
    mlp_bias=False,
    norm="rms_offset",
    sandwich_norms=True,
    scaled_embedding=True,
)
GEMMA3 = dataclasses.replace(
    GEMMA2,
    architectures={
        "Gemma3ForCausalLM": "causal_lm",
        "Gemma3TextForSequenceClassification": "classifier",
        "Gemma3TextModel": "none",
    },
    defaults={
        **GEMMA2.defaults,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    layer_kinds=listed_or(gemma3_slides),
    # transformers 5.24 declares the first of these and does not use it.
    fixed={**GEMMA2.fixed, "attn_logit_softcapping": (None,)},
    qk_norm="head",
)
GPT2 = dataclasses.replace(
    LLAMA,
    architectures={
        "GPT2LMHeadModel": "causal_lm",
        "GPT2ForSequenceClassification": "classifier",
        "GPT2Model": "none",
    },
    defaults={
        **COMMON,
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
