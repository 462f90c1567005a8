"""The engine on tiny random models with experts, against transformers' own tokens."""

import numpy as np
import pytest

from lora_jax import LoRAConfig, LRUCacheLoRAModelManager
from lora_jax.models import load_causal_lm
from lora_jax.serving import Engine, GenerationRequest

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {
        "num_experts": 8,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "gpt_oss": {"num_local_experts": 8, "head_dim": 16, "sliding_window": 5},
}
PROMPTS = ((5, 9, 2), (11, 3, 60, 7, 7, 31, 20), (1,), (40, 41, 42, 43, 44))
TOKENS = 8


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_base_rows_get_the_tokens_that_transformers_chooses(family, tmp_path):
    import torch
    import transformers

    torch.manual_seed(3)
    values = {**SIZES, **FAMILIES[family], "initializer_range": 0.3}
    if family == "gpt_oss":
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.AutoConfig.for_model(family, **values)
    oracle = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    oracle.save_pretrained(tmp_path)

    model = load_causal_lm(tmp_path)
    manager = LRUCacheLoRAModelManager(model, LoRAConfig(max_loras=1, max_lora_rank=4))
    engine = Engine(
        model,
        manager,
        max_num_seqs=3,
        max_model_len=24,
        eos_ids=[],
        prefill_lengths=[8],
    )
    results = engine.generate(
        [
            GenerationRequest(f"r{index}", prompt, max_tokens=TOKENS)
            for index, prompt in enumerate(PROMPTS)
        ]
    )
    answers = set()
    for prompt, result in zip(PROMPTS, results, strict=True):
        tokens = list(prompt)
        for _ in range(TOKENS):
            with torch.no_grad():
                logits = oracle(torch.tensor([tokens])).logits[0, -1].numpy()
            tokens.append(int(np.argmax(logits)))
        assert list(result.token_ids) == tokens[len(prompt) :]
        answers.add(result.token_ids)
    assert len(answers) == len(PROMPTS)
