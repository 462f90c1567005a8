"""Every adapter that PEFT can write for a mixture of experts, in one batch, as PEFT.

On each family of models; a row's adapter may change who is routed where.
"""

import copy
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax import (
    LoRAConfig,
    LoRAMapping,
    LRUCacheLoRAModelManager,
    load_adapter,
    load_model,
)

pytestmark = pytest.mark.torch

VOCAB, TIME = 60, 9
TOLERANCE = 3e-4

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


def _tokens():
    return np.random.default_rng(0).integers(3, VOCAB, TIME)


def _logits(model):
    import torch

    with torch.no_grad():
        return model(torch.tensor(_tokens()[None])).logits[0].numpy()


def _base(family, changes):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **changes)
    model = AutoModelForCausalLM.from_config(config)
    _shake(model.parameters(), 0)
    return model.eval()


def _write(base, options, seed, folder):
    """Moves all that training would move; saves; gives PEFT's logits."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 3, "lora_alpha": 7, "target_modules": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), LoraConfig(**settings | options))
        _shake((p for p in model.parameters() if p.requires_grad), seed, 0.3)
        model.save_pretrained(folder)
    return _logits(model.eval())


@pytest.fixture(scope="module", params=FAMILIES)
def answers(request, tmp_path_factory):
    """The served model's logits and PEFT's, by name of the adapter."""
    family = request.param.split(",")[0]
    changes, adapters = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("moe")
    base = _base(family, changes)
    base.save_pretrained(folder / "base")
    expected = {"base": _logits(base)}
    for seed, (name, options) in enumerate(adapters.items(), start=1):
        expected[name] = _write(base, options, seed, folder / f"a{seed}")
    model = load_model(str(folder / "base"))
    number = len(adapters)
    config = LoRAConfig(max_loras=number, max_lora_rank=8)
    manager = LRUCacheLoRAModelManager(model, config)
    for seed in range(1, number + 1):
        manager.add_adapter(load_adapter(folder / f"a{seed}", adapter_id=seed))
        manager.activate_adapter(seed)
    ids = np.random.default_rng(1).permutation(number + 1)
    manager.set_adapter_mapping(
        LoRAMapping(np.repeat(ids, TIME).tolist(), ids.tolist())
    )
    batch = jnp.asarray(np.tile(_tokens(), (number + 1, 1)), jnp.int32)
    logits = np.asarray(model(batch))
    names = list(expected)
    return {names[id_]: logits[i] for i, id_ in enumerate(ids)}, expected


def test_each_row_is_peft_s_answer(answers):
    found, expected = answers
    for name, logits in expected.items():
        np.testing.assert_allclose(
            found[name], logits, atol=TOLERANCE, rtol=0, err_msg=name
        )


def test_each_adapter_is_visible(answers):
    _, expected = answers
    names = list(expected)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            moved = np.abs(expected[first] - expected[second]).max(axis=-1)
            assert moved.max() > 10 * TOLERANCE, (first, second)
