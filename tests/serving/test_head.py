"""LoRA on the head: sampled rows and scored prompts, also where chunks of them end."""

import dataclasses

import numpy as np
import pytest

from lora_jax import LoRAConfig, LRUCacheLoRAModelManager
from lora_jax.adapters import LowRank
from lora_jax.serving import Engine, GenerationRequest, steps
from tiny_llama import CONFIG, Oracle, tiny_adapter, tiny_model

CHUNK = 4
"""Prompt tokens that are scored at once; small, so that prompts cross its edges."""

LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1)
NAMES = (None, "ada", "bob", "cyd")
TOKENS = 3


def _adapter(name: str, seed: int):
    """One with LoRA on the head, alone (`ada`) or with the layers'."""
    rng = np.random.default_rng(seed)
    width, vocab = CONFIG["hidden_size"], CONFIG["vocab_size"]
    head = LowRank(
        rng.normal(size=(2, width)).astype("f4"),
        rng.normal(size=(vocab, 2)).astype("f4"),
        1.5,
    )
    plain = tiny_adapter(name, seed)
    layers = {} if name == "ada" else plain.parts
    return dataclasses.replace(plain, parts={**layers, "lm_head": head})


@pytest.fixture(scope="module")
def served():
    model = tiny_model()
    oracle = Oracle(model)
    adapters = {name: _adapter(name, i) for i, name in enumerate(NAMES) if name}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "SCORE_TOKENS", CHUNK)
        config = LoRAConfig(max_loras=3, max_lora_rank=8)
        manager = LRUCacheLoRAModelManager(model, config)
        for adapter in adapters.values():
            manager.add_adapter(adapter)
        engine = Engine(
            model, manager, max_num_seqs=4, max_model_len=16, prefill_lengths=[10]
        )
        yield engine, oracle, {None: None, **adapters}


@pytest.mark.parametrize("length", LENGTHS)
def test_scores_and_draws_equal_the_merged_head(served, length):
    engine, oracle, adapters = served
    prompts = {
        name: tuple(np.random.default_rng(10 * length + i).integers(0, 61, length))
        for i, name in enumerate(NAMES)
    }
    asked = [
        GenerationRequest(
            f"{name} {length}",
            tuple(map(int, prompts[name])),
            lora=name,
            max_tokens=TOKENS,
            prompt_logprobs=True,
        )
        for name in NAMES
    ]
    for request, result in zip(asked, engine.generate(asked), strict=True):
        prompt, adapter = request.prompt_token_ids, adapters[request.lora]
        expected = oracle.prompt_logprobs(prompt, adapter)
        found = np.asarray(result.prompt_logprobs[1:], np.float64)
        np.testing.assert_allclose(found, expected, atol=5e-4)
        assert result.token_ids == oracle.greedy(prompt, adapter, TOKENS)
        if adapter is not None and length > 1:
            headless = dict(adapter.parts)
            del headless["lm_head"]
            without = dataclasses.replace(adapter, parts=headless)
            plain = oracle.prompt_logprobs(prompt, without)
            assert np.abs(expected - plain).max() > 0.1
