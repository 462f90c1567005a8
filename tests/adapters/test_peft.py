"""Against PEFT itself: what it wrote is read, merged and written to equal logits."""

import json
from pathlib import Path

import numpy as np
import pytest

from lora_jax.adapters import load_adapter, merge_adapters, save_adapter

pytestmark = pytest.mark.torch

TOLERANCE = 2e-5
"""Of float32 logits of order 1."""

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
LINEAR = ["q_proj", "v_proj", "o_proj", "down_proj"]
ALL_BIAS = {"attention_bias": True, "mlp_bias": True}
TIED = {"tie_word_embeddings": True}
PATTERNS = {"q_proj": 2, r"layers\.1\.self_attn\.v_proj": 7}
ALPHAS = {"q_proj": 5, r".*\.down_proj": 3}

CASES = {
    "plain": ({}, {"target_modules": LINEAR}),
    "rslora": ({}, {"target_modules": LINEAR, "use_rslora": True}),
    "patterns": (
        {},
        {"target_modules": LINEAR, "rank_pattern": PATTERNS, "alpha_pattern": ALPHAS},
    ),
    "rslora_patterns": (
        {},
        {
            "target_modules": "all-linear",
            "rank_pattern": PATTERNS,
            "alpha_pattern": ALPHAS,
            "use_rslora": True,
        },
    ),
    "regex": ({}, {"target_modules": r".*\.[01]\.self_attn\.(q|o)_proj"}),
    "lora_bias": (ALL_BIAS, {"target_modules": LINEAR, "lora_bias": True}),
    "dora": (ALL_BIAS, {"target_modules": LINEAR, "use_dora": True}),
    "bias_all": (ALL_BIAS, {"target_modules": ["q_proj"], "bias": "all"}),
    "lora_only": (ALL_BIAS, {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "embedding": ({}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "embedding_tied": (TIED, {"target_modules": ["q_proj", "embed_tokens"]}),
    "head": ({}, {"target_modules": ["q_proj", "lm_head"]}),
    "head_tied": (TIED, {"target_modules": ["q_proj", "lm_head"]}),
    "both_tied": (TIED, {"target_modules": ["embed_tokens", "lm_head"]}),
    "dora_everywhere": (
        {},
        {"target_modules": ["v_proj", "embed_tokens", "lm_head"], "use_dora": True},
    ),
    "tokens": ({}, {"target_modules": LINEAR, "trainable_token_indices": [7, 3, 98]}),
    "tokens_tied": (
        TIED,
        {"target_modules": LINEAR, "trainable_token_indices": [7, 3, 98]},
    ),
    "tokens_of_both": (
        {},
        {
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [5, 2]},
        },
    ),
    "saved": (
        {},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "saved_tied": (
        TIED,
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "saved_norm": ({}, {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
}
TOKENS = np.arange(36).reshape(2, 18) * 7 % 100
TOKENS[:, 3] = [7, 98]


@pytest.fixture(scope="module")
def torch():
    import torch

    return torch


def make_base(folder: Path, options: dict) -> Path:
    """Writes a random tiny Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **options))
    for name, parameter in model.named_parameters():
        spread = 1.0 if "layernorm" in name or "norm." in name else 0.2
        torch.nn.init.normal_(parameter, 0.0, spread)
    model.save_pretrained(folder)
    return folder


def load_base(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def write_adapter(base: Path, folder: Path, fields: dict) -> Path:
    """Writes an adapter whose every trained value is visible."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=9, task_type="CAUSAL_LM", **fields)
    model = get_peft_model(load_base(base), config)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spread = 0.1 if "lora_" in name and "vector" not in name else 0.5
            parameter.data += spread * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def logits_of(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.as_tensor(TOKENS)).logits.numpy()


def peft_logits(base: Path, adapter: Path) -> np.ndarray:
    from peft import PeftModel

    return logits_of(PeftModel.from_pretrained(load_base(base), adapter).eval())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_reading_merging_and_writing_agree_with_peft(tmp_path, torch, case):
    options, fields = CASES[case]
    base = make_base(tmp_path / "base", options)
    written = write_adapter(base, tmp_path / "peft", fields)
    expected = peft_logits(base, written)
    plain = logits_of(load_base(base))
    moved = np.abs(expected - plain).max(axis=-1)
    assert moved[:, 1:].min() > 10 * TOLERANCE  # q_proj alone leaves the first as it is

    adapter = load_adapter(written, max_lora_rank=16)
    assert adapter.report.total == adapter.report.matched + len(adapter.report.ignored)
    merge_adapters(base, [adapter], tmp_path / "merged")
    np.testing.assert_allclose(
        logits_of(load_base(tmp_path / "merged")), expected, atol=TOLERANCE, rtol=0
    )
    again = save_adapter(adapter, tmp_path / "ours")
    np.testing.assert_allclose(
        peft_logits(base, again), expected, atol=TOLERANCE, rtol=0
    )
    assert load_adapter(again).content_hash == adapter.content_hash
    assert json.loads((again / "adapter_config.json").read_text())["r"] == 4


EXPERTS = {
    "both": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "gate_up": ["mlp.experts.gate_up_proj"],
    "down": ["mlp.experts.down_proj"],
    "router": ["mlp.gate.weight"],
}
MOE = {
    **SIZES,
    "num_hidden_layers": 1,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", EXPERTS)
def test_expert_factors_mean_what_peft_means_by_them(tmp_path, torch, case):
    """The flat factors, read expert by expert and added to the base, give its logits.

    Rank 3 and 4 experts differ, so that taking one axis for the other would show.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    base = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE)).eval()
    state = {name: value.clone() for name, value in base.state_dict().items()}
    plain = logits_of(base)
    fields = {"target_modules": ["q_proj"], "target_parameters": EXPERTS[case]}
    fields |= {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"gate_up_proj": 5}}
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=7, **fields))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    expected = logits_of(model.eval())
    assert np.abs(expected - plain)[:, 1:].max(axis=-1).min() > 10 * TOLERANCE
    model.save_pretrained(tmp_path / "a")

    adapter = load_adapter(tmp_path / "a")
    assert adapter.report.matched == adapter.report.total
    for module, part in adapter.parts.items():
        if part.kind == "experts":
            name = f"{module.removesuffix('.base_layer')}.{part.parameter}"
            a = part.a.reshape(4, part.rank, -1)
            b = part.b.reshape(-1, part.rank, 4)
            delta = np.einsum("eri,ore->eoi", a, b)
        else:
            name, delta = f"{module}.weight", part.b @ part.a
        state[name] = state[name] + torch.tensor(part.scale * delta)
    merged = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE)).eval()
    merged.load_state_dict(state)
    np.testing.assert_allclose(logits_of(merged), expected, atol=TOLERANCE, rtol=0)
    again = load_adapter(save_adapter(adapter, tmp_path / "b"))
    assert again.content_hash == adapter.content_hash
