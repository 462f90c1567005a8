"""Activated LoRA: weights act from the last invocation on, in a mixed batch."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax import LoRAConfig, LoRAMapping, LRUCacheLoRAModelManager
from lora_jax.routing import activation_start
from lora_jax.serving import Engine, GenerationRequest
from tiny_llama import Oracle, tiny_adapter, tiny_model

INVOCATION = (5, 6)
TOKENS = 5

PROMPTS = {
    "no occurrence": ((1, 2, 3, 5), None),
    "from the first token": ((5, 6, 9, 10), 0),
    "in the middle": ((1, 2, 5, 6, 9, 3), 2),
    "twice": ((5, 6, 1, 2, 5, 6, 3), 4),
    "at the end": ((1, 2, 3, 5, 6), 3),
    "cut off": ((5, 6, 4, 4, 5), 0),
    "only that": ((5, 6), 0),
}
"""Name -> prompt, and the first token on which the adapter acts."""


@pytest.fixture(scope="module")
def served():
    model = tiny_model()
    oracle = Oracle(model)
    config = LoRAConfig(max_loras=2, max_lora_rank=8)
    manager = LRUCacheLoRAModelManager(model, config)
    plain = tiny_adapter("plain", 1)
    activated = dataclasses.replace(
        tiny_adapter("activated", 2), invocation_tokens=INVOCATION
    )
    for adapter in (plain, activated):
        manager.add_adapter(adapter)
    engine = Engine(
        model, manager, max_num_seqs=4, max_model_len=24, prefill_lengths=[8]
    )
    return engine, manager, oracle, activated


@pytest.mark.parametrize("name", PROMPTS)
def test_the_last_occurrence_is_where_it_begins(name):
    prompt, start = PROMPTS[name]
    assert activation_start(prompt, INVOCATION) == start
    assert activation_start(prompt, ()) == 0


def test_each_row_equals_the_model_with_ids_from_the_invocation_on(served):
    engine, manager, oracle, activated = served
    requests = [
        GenerationRequest(
            f"{name} {lora}",
            prompt,
            lora=lora,
            max_tokens=TOKENS,
            prompt_logprobs=True,
        )
        for name, (prompt, _) in PROMPTS.items()
        for lora in ("activated", None, "plain")
    ]
    results = {result.request_id: result for result in engine.generate(requests)}
    manager.activate_adapter(activated.id)
    for name, (prompt, start) in PROMPTS.items():
        result = results[f"{name} activated"]
        begin = len(prompt) + TOKENS if start is None else start
        tokens = [*prompt, *result.token_ids[:-1]]
        ids = [activated.id if place >= begin else 0 for place in range(len(tokens))]
        manager.set_adapter_mapping(LoRAMapping(ids, ids))
        logits = np.asarray(manager.model(jnp.asarray([tokens]))[0])
        greedy = logits[len(prompt) - 1 :].argmax(axis=-1)
        assert result.token_ids == tuple(greedy.tolist()), name
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        scored = [logprobs[place, token] for place, token in enumerate(prompt[1:])]
        np.testing.assert_allclose(result.prompt_logprobs[1:], scored, atol=1e-4)
        base = results[f"{name} None"]
        if start is None:
            assert result.token_ids == base.token_ids
            assert result.prompt_logprobs == base.prompt_logprobs
        else:
            before = result.prompt_logprobs[: start + 1]
            np.testing.assert_allclose(
                before[1:], base.prompt_logprobs[1 : start + 1], atol=1e-5
            )
        if start == 0:
            assert result.token_ids == oracle.greedy(prompt, activated, TOKENS)


def test_the_answers_of_the_kinds_differ(served):
    _, _, oracle, activated = served
    for name in ("in the middle", "twice", "at the end"):
        prompt, start = PROMPTS[name]
        whole = oracle.logits(prompt, activated)
        base = oracle.logits(prompt, None)
        assert start
        assert np.abs(whole - base)[-1].max() > 0.1
