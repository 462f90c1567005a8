"""An adapter that has added tokens: legal in its own rows, for nobody else."""

import dataclasses

import numpy as np
import pytest

from lora_jax import LoRAConfig, LRUCacheLoRAModelManager, RequestError
from lora_jax.adapters import FullModule
from lora_jax.serving import Engine, GenerationRequest, SamplingParams
from tiny_llama import CONFIG, Oracle, tiny_adapter, tiny_model

VOCAB, ADDED, TOKENS = CONFIG["vocab_size"], 3, 6
NEW = VOCAB + 1


@pytest.fixture(scope="module")
def served():
    model = tiny_model()
    base, own = Oracle(model), Oracle(model)
    rng = np.random.default_rng(0)
    added = rng.normal(size=(ADDED, CONFIG["hidden_size"])) * 6.0
    table = np.concatenate([base.embedding + 0.3, added]).astype(np.float32)
    own.embedding = table.astype(np.float64)
    adapter = tiny_adapter("wide", 1)
    parts = {
        **adapter.parts,
        "model.embed_tokens": FullModule(table),
        "lm_head": FullModule(table),
    }
    adapter = dataclasses.replace(adapter, parts=parts)
    manager = LRUCacheLoRAModelManager(model, LoRAConfig(max_loras=2, max_lora_rank=8))
    manager.add_adapter(adapter)
    engine = Engine(
        model, manager, max_num_seqs=3, max_model_len=16, prefill_lengths=[8]
    )
    plain = dataclasses.replace(adapter, parts=tiny_adapter("wide", 1).parts)
    return engine, base, own, plain


def test_each_row_draws_from_its_own_vocabulary(served):
    engine, base, own, plain = served
    prompts = {"wide": (3, NEW, VOCAB + 2, 5), None: (3, 9, 5)}
    requests = [
        GenerationRequest(str(lora), prompt, lora=lora, max_tokens=TOKENS)
        for lora, prompt in prompts.items()
    ]
    wide, plain_row = engine.generate(requests)
    assert wide.token_ids == own.greedy(prompts["wide"], plain, TOKENS)
    assert plain_row.token_ids == base.greedy(prompts[None], None, TOKENS)


def test_draws_of_base_rows_stay_inside_the_base_vocabulary(served):
    engine, *_ = served
    hot = SamplingParams(temperature=50.0, seed=1)
    requests = [
        GenerationRequest(f"{lora} {i}", (3, 9), lora=lora, max_tokens=8, sampling=hot)
        for i in range(6)
        for lora in (None, "wide")
    ]
    drawn = {None: set(), "wide": set()}
    for request, result in zip(requests, engine.generate(requests), strict=True):
        drawn[request.lora] |= set(result.token_ids)
    assert max(drawn[None]) < VOCAB
    assert max(drawn["wide"]) < VOCAB + ADDED


def test_added_tokens_in_a_base_row_are_refused(served):
    engine, *_ = served
    with pytest.raises(RequestError, match=rf"token ids \[{NEW}\] are outside the"):
        engine.generate([GenerationRequest("1", (3, NEW), max_tokens=1)])
    beyond = GenerationRequest("1", (3, VOCAB + ADDED), lora="wide", max_tokens=1)
    with pytest.raises(RequestError, match=f"vocabulary of {VOCAB + ADDED}"):
        engine.generate([beyond])
