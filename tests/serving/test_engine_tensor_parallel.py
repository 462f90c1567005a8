"""The engine over a decoder cut over devices: the tokens of one device."""

import dataclasses

import jax
import pytest

from lora_jax import LoRAConfig, LRUCacheLoRAModelManager, shard_tensors
from lora_jax.serving import Engine, GenerationRequest
from lora_jax.serving.compilations import CompilationCounter
from tiny_llama import tiny_adapter, tiny_model

RANK, TOKENS = 4, 6
PROMPTS = ((5, 9, 2), (11, 3, 60, 7, 7, 31, 20), (1,), (40, 41, 42, 43, 44))
CHANGES = {"vocab_size": 64, "num_hidden_layers": 1}


def _adapter(number):
    adapter = tiny_adapter(f"a{number}", number, RANK)
    parts = {name: part for name, part in adapter.parts.items() if "layers.0" in name}
    return dataclasses.replace(adapter, id=number, parts=parts)


def _answers(devices, *, full=False):
    model = tiny_model(**CHANGES)
    if devices:
        found = jax.devices()[:devices]
        shard_tensors(model, jax.make_mesh((devices,), ("tensor",), devices=found))
    config = LoRAConfig(
        max_loras=2, max_cpu_loras=3, max_lora_rank=RANK, fully_sharded_loras=full
    )
    manager = LRUCacheLoRAModelManager(model, config)
    for number in (1, 2, 3):
        manager.add_adapter(_adapter(number))
    engine = Engine(
        model,
        manager,
        max_num_seqs=3,
        max_model_len=16,
        eos_ids=[],
        prefill_lengths=[8],
    )
    requests = [
        GenerationRequest(f"{lora}-{i}", prompt, max_tokens=TOKENS, lora=lora)
        for i, prompt in enumerate(PROMPTS)
        for lora in (None, "a1", "a2", "a3")
    ]
    answers = [result.token_ids for result in engine.generate(requests)]
    with CompilationCounter() as counter:
        again = engine.generate(requests[::-1])
    assert counter.programs == []
    assert [result.token_ids for result in again[::-1]] == answers
    return answers


@pytest.fixture(scope="module")
def alone():
    return _answers(0)


@pytest.mark.parametrize(("devices", "full"), [(2, False), (2, True), (4, False)])
def test_devices_generate_the_tokens_of_one(devices, full, alone):
    """Two key heads, so fewer than devices if there are four."""
    assert len(set(alone)) > len(alone) // 2
    assert _answers(devices, full=full) == alone
