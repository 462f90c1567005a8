"""Tiny models with experts, and every adapter that PEFT can write for them."""

import copy
import warnings

import numpy as np

VOCAB, TIME = 60, 9
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GPT_OSS = {"intermediate_size": 20, "num_local_experts": 5, "head_dim": 8}
QWEN = {"intermediate_size": 28, "moe_intermediate_size": 20, "num_experts": 5}

COMMON = {
    "both": {"target_parameters": BOTH},
    "reversed": {"target_parameters": BOTH[::-1], "r": 2},
    "gate and up": {"target_parameters": BOTH[:1]},
    "down": {"target_parameters": BOTH[1:]},
    "attention": {"target_modules": ["q_proj", "o_proj"]},
    "attention and experts": {
        "target_modules": ["k_proj", "v_proj"],
        "target_parameters": BOTH,
        "rank_pattern": {"down_proj": 2, "k_proj": 1},
        "alpha_pattern": {"gate_up_proj": 5},
    },
    "rslora": {"target_parameters": BOTH, "use_rslora": True},
}
ROUTER = {
    "router": {"target_parameters": ["mlp.gate.weight"]},
    "router and experts": {"target_parameters": [*BOTH, "mlp.gate.weight"]},
}
BY_MODULE = {"modules": {"target_modules": ["gate_proj", "up_proj", "down_proj"]}}
MIXTRAL_MODULES = {"w1, w2, w3": {"target_modules": ["w1", "w2", "w3"]}}
SHARED = {
    "shared expert": {
        "target_modules": [
            f"shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")
        ],
    },
    "shared and routed": {
        "target_modules": ["shared_expert.up_proj", "shared_expert_gate"],
        "target_parameters": BOTH,
    },
}

FAMILIES = {
    "mixtral": (
        {"intermediate_size": 20, "num_local_experts": 5},
        COMMON | ROUTER | MIXTRAL_MODULES,
    ),
    "qwen3_moe": (QWEN | {"head_dim": 8}, COMMON | ROUTER | BY_MODULE),
    "qwen2_moe": (
        QWEN | {"shared_expert_intermediate_size": 18},
        COMMON | ROUTER | SHARED,
    ),
    "olmoe": ({"intermediate_size": 20, "num_experts": 5}, COMMON | ROUTER | BY_MODULE),
    "gpt_oss": (
        GPT_OSS,
        COMMON | {"router": {"target_parameters": ["mlp.router.weight"]}},
    ),
    "gpt_oss, square": (GPT_OSS | {"intermediate_size": 24}, {"both": COMMON["both"]}),
}
"""`model_type` -> changes of its config, and options of `peft.LoraConfig` by name."""


def _shake(parameters, seed, size=0.15):
    """Moves every parameter, so that nothing is zero, one, or where it began."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(size * noise)


def tokens():
    return np.random.default_rng(0).integers(3, VOCAB, TIME)


def torch_logits(model):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens()[None])).logits[0].numpy()


def base_model(family, changes):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **changes)
    model = AutoModelForCausalLM.from_config(config)
    _shake(model.parameters(), 0)
    return model.eval()


def write_adapter(base, options, seed, folder):
    """Moves all that training would move; saves; gives PEFT's logits."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 3, "lora_alpha": 7, "target_modules": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), LoraConfig(**settings | options))
        _shake((p for p in model.parameters() if p.requires_grad), seed, 0.3)
        model.save_pretrained(folder)
    return torch_logits(model.eval())
