"""One adapter on every family of models, beside a base row, as PEFT answers it."""

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
TOLERANCE = 2e-4

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
GEMMA = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 12}
LLAMA_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
PHI_LINEAR = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
BERT_LINEAR = ["query", "key", "value", "dense"]
GPT2_LINEAR = ["c_attn", "c_proj", "c_fc"]
TEXT, SCORES, PLAIN = (
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "AutoModel",
)

CASES = {
    "mistral": ("mistral", {"sliding_window": 4}, TEXT, LLAMA_LINEAR),
    "qwen2": ("qwen2", {}, TEXT, LLAMA_LINEAR),
    "qwen3": ("qwen3", {"head_dim": 16}, TEXT, LLAMA_LINEAR),
    "phi3": ("phi3", {}, TEXT, PHI_LINEAR),
    "gemma2": ("gemma2", GEMMA, TEXT, LLAMA_LINEAR),
    "gemma3": ("gemma3_text", GEMMA, TEXT, LLAMA_LINEAR),
    "gpt2": ("gpt2", GPT2, TEXT, GPT2_LINEAR),
    "llama body": ("llama", {}, PLAIN, LLAMA_LINEAR),
    "bert body": ("bert", {}, PLAIN, BERT_LINEAR),
    "roberta body": ("roberta", {"pad_token_id": 1}, PLAIN, BERT_LINEAR),
    "llama scores": ("llama", {"num_labels": 3}, SCORES, LLAMA_LINEAR),
    "qwen3 scores": ("qwen3", {"head_dim": 16}, SCORES, LLAMA_LINEAR),
    "bert scores": ("bert", {"num_labels": 3}, SCORES, BERT_LINEAR),
    "xlm-roberta scores": (
        "xlm-roberta",
        {"num_labels": 3, "pad_token_id": 1},
        SCORES,
        ["query", "value"],
    ),
}
"""Name -> `model_type`, changes of its config, `transformers` class, target modules."""


def _shake(parameters, seed):
    """Moves every parameter, so that nothing is zero, one, or where it began."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))


def _tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(3, VOCAB, (1, TIME))


def _saved(case, folder) -> tuple[np.ndarray, np.ndarray]:
    """Saves a base and an adapter; returns what each answers for the tokens."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    model_type, changes, auto, targets = CASES[case]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **changes})
    base = getattr(transformers, auto).from_config(config).eval()
    _shake(base.parameters(), 1)
    base.save_pretrained(folder / "base")
    tokens = torch.tensor(_tokens())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = base(tokens)[0][0].numpy()
        kind = {TEXT: "CAUSAL_LM", SCORES: "SEQ_CLS", PLAIN: "FEATURE_EXTRACTION"}
        options = LoraConfig(
            task_type=kind[auto], r=4, lora_alpha=6, target_modules=targets
        )
        adapted = get_peft_model(base, options).eval()
        _shake((p for p in adapted.parameters() if p.requires_grad), 2)
        adapted.save_pretrained(folder / "adapter")
        return expected, adapted(tokens)[0][0].numpy()


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_equals_peft_beside_a_base_row(case, tmp_path):
    base, adapted = _saved(case, tmp_path)
    assert np.abs(base - adapted).max() > 10 * TOLERANCE
    manager = LRUCacheLoRAModelManager(
        load_model(tmp_path / "base"), LoRAConfig(max_loras=2, max_lora_rank=4)
    )
    manager.add_adapter(load_adapter(tmp_path / "adapter", adapter_id=7))
    manager.activate_adapter(7)
    manager.set_adapter_mapping(LoRAMapping([0] * TIME + [7] * TIME, [0, 7]))
    tokens = jnp.asarray(np.tile(_tokens(), (2, 1)), jnp.int32)
    inputs = (tokens,) if CASES[case][2] == TEXT else (tokens, tokens > 0)
    answers = np.asarray(manager.model(*inputs))
    np.testing.assert_allclose(answers[0], base, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(answers[1], adapted, rtol=0, atol=TOLERANCE)
