"""The main job: many adapters, one batch, few slots; every row as if it were alone.

Once on a tiny random Llama against dense float64 weights, and once (slow, needs torch)
on a real model against transformers and PEFT.
"""

import dataclasses
import json
import random
import warnings

import jax
import numpy as np
import pytest

from lora_jax import (
    AdapterError,
    LoRAConfig,
    LRUCacheLoRAModelManager,
    RequestError,
    load_model,
    load_tokenizer,
)
from lora_jax.serving import CompilationCounter, Engine, GenerationRequest
from tiny_llama import ALL, Oracle, tiny_adapter, tiny_model, write_adapter

NAMES = tuple(f"a{index}" for index in range(8))
SLOTS = 4
ROWS = 5
TINY_TOKENS = 8
LOGPROB_TOLERANCE = 2e-3


@dataclasses.dataclass
class House:
    engine: Engine
    manager: LRUCacheLoRAModelManager
    requests: list
    expected: dict  # request id -> greedy tokens and prompt log-probabilities


def build(model, adapters, *, max_model_len, prompt_len, max_rank):
    config = LoRAConfig(max_loras=SLOTS, max_cpu_loras=12, max_lora_rank=max_rank)
    manager = LRUCacheLoRAModelManager(model, config)
    for adapter in adapters.values():
        manager.add_adapter(adapter)
    engine = Engine(
        model,
        manager,
        max_num_seqs=ROWS,
        max_model_len=max_model_len,
        prefill_lengths=[prompt_len],
    )
    return engine, manager


def assert_right(house, requests, results):
    for request, result in zip(requests, results, strict=True):
        tokens, logprobs = house.expected[request.request_id]
        assert result.token_ids == tokens, request
        found = np.asarray(result.prompt_logprobs[1:], np.float64)
        np.testing.assert_allclose(found, logprobs, atol=LOGPROB_TOLERANCE)


def assert_all_differ(house):
    """A silent no-op would pass every other test."""
    assert len({tokens for tokens, _ in house.expected.values()}) > len(NAMES)


@pytest.fixture(scope="module")
def tiny():
    model = tiny_model()
    oracle = Oracle(model)
    adapters = {name: tiny_adapter(name, seed=i + 1) for i, name in enumerate(NAMES)}
    engine, manager = build(
        model, adapters, max_model_len=24, prompt_len=12, max_rank=8
    )
    requests, expected = [], {}
    for index, name in enumerate([*NAMES, None, *NAMES[:3], None, None]):
        prompt = np.random.default_rng(index).integers(0, 61, 3 + index % 9).tolist()
        request = GenerationRequest(
            f"r{index}",
            tuple(prompt),
            lora=name,
            max_tokens=TINY_TOKENS,
            prompt_logprobs=True,
        )
        adapter = adapters.get(name)
        requests.append(request)
        expected[request.request_id] = (
            oracle.greedy(prompt, adapter, TINY_TOKENS),
            oracle.prompt_logprobs(prompt, adapter),
        )
    return House(engine, manager, requests, expected)


def test_every_row_is_as_if_alone_in_any_order(tiny):
    assert_all_differ(tiny)
    for seed in range(3):
        order = random.Random(seed).sample(tiny.requests, len(tiny.requests))
        assert_right(tiny, order, tiny.engine.generate(order))


def test_base_rows_in_a_mixed_batch_are_bitwise_those_of_the_bare_model(tiny):
    bare = Engine(
        tiny_model(), max_num_seqs=ROWS, max_model_len=24, prefill_lengths=[12]
    )
    base_only = [r for r in tiny.requests if r.lora is None]
    mixed = [*tiny.requests[:2], *base_only]
    alone = bare.generate([dataclasses.replace(r, lora=None) for r in mixed])
    together = tiny.engine.generate(mixed)
    for own, other in zip(alone[2:], together[2:], strict=True):
        assert own.token_ids == other.token_ids
        assert own.prompt_logprobs == other.prompt_logprobs
    asked = [dataclasses.replace(r, lora=None) for r in mixed[:2]] + base_only
    for own, other in zip(
        bare.prompt_logits(asked), tiny.engine.prompt_logits(mixed), strict=True
    ):
        same = np.array_equal(own, other)
        assert same == (own.shape[0] in {len(r.prompt_token_ids) for r in base_only})


def test_nothing_compiles_for_other_ranks_targets_evictions_or_reloads(tiny):
    tiny.engine.warmup(scored=True)
    newcomers = [
        tiny_adapter("small", seed=50, rank=1),
        tiny_adapter("large", seed=51, rank=8),
        tiny_adapter("partial", seed=52, rank=5, targets=ALL[:2]),
        tiny_adapter("single", seed=53, rank=2, targets=ALL[-1:]),
    ]
    with CompilationCounter() as counter:
        for adapter in newcomers:
            tiny.manager.add_adapter(adapter)
        asked = [
            dataclasses.replace(tiny.requests[0], lora=a.name, request_id=a.name)
            for a in newcomers
        ]
        answers = [r.token_ids for r in tiny.engine.generate(asked)]
        assert_right(tiny, tiny.requests, tiny.engine.generate(tiny.requests))
        again = [r.token_ids for r in tiny.engine.generate(asked[::-1])]
        for adapter in newcomers:
            tiny.manager.remove_adapter(adapter.id)
    assert counter.programs == []
    assert answers == again[::-1]
    assert len(set(answers)) == len(newcomers)


def test_a_reused_slot_leaves_nothing_of_its_former_adapter():
    model = tiny_model()
    oracle = Oracle(model)
    adapters = {
        "wide": tiny_adapter("wide", seed=1, rank=8),
        "narrow": tiny_adapter("narrow", seed=2, rank=2, targets=ALL[:1]),
    }
    config = LoRAConfig(max_loras=1, max_cpu_loras=2, max_lora_rank=8)
    manager = LRUCacheLoRAModelManager(model, config)
    for adapter in adapters.values():
        manager.add_adapter(adapter)
    engine = Engine(model, manager, max_num_seqs=1, max_model_len=16)
    prompt = (3, 1, 4, 1, 5)
    for name in ("wide", "narrow", None, "narrow", "wide", "narrow"):
        request = GenerationRequest("r", prompt, lora=name, max_tokens=6)
        (result,) = engine.generate([request])
        assert result.token_ids == oracle.greedy(prompt, adapters.get(name), 6), name


def test_a_broken_adapter_is_refused_with_every_fault_and_changes_nothing(
    tiny, tmp_path
):
    def state():
        bank = [np.asarray(leaf) for leaf in jax.tree.leaves(tiny.manager.bank)]
        return tiny.manager.list_adapters(), tiny.manager.lora_index_to_id, bank

    before = state()
    for name, (spoil, faults) in BROKEN.items():
        folder = write_adapter(tmp_path / name, seed=70)
        spoil(folder)
        with pytest.raises(AdapterError) as error:
            tiny.engine.adapters.add(name, folder)
        for fault in faults:
            assert fault in str(error.value), (name, str(error.value))
        with pytest.raises(RequestError, match="there is no adapter"):
            tiny.engine.add_request(dataclasses.replace(tiny.requests[0], lora=name))
    after = state()
    assert before[:2] == after[:2]
    for old, new in zip(before[2], after[2], strict=True):
        np.testing.assert_array_equal(old, new)
    assert_right(tiny, tiny.requests, tiny.engine.generate(tiny.requests))


def _cut(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _rewrite(folder, changes):
    from safetensors.numpy import load_file, save_file

    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, shape in changes.items():
        key = f"base_model.model.model.layers.{name}.weight"
        tensors[key] = np.ones(shape, np.float32)
    save_file(tensors, path)


def _add_unknown_modules(folder):
    names = ("0.self_attn.z_proj", "1.mlp.w_proj")
    _rewrite(folder, {f"{n}.lora_A": (4, 32) for n in names})
    _rewrite(folder, {f"{n}.lora_B": (32, 4) for n in names})


def _change_shapes(folder):
    names = ("0.self_attn.q_proj", "1.mlp.up_proj")
    _rewrite(folder, {f"{n}.lora_A": (4, 31) for n in names})


def _enlarge(folder):
    write_adapter(folder, seed=70, rank=9)


BROKEN = {
    "missing": (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        ["adapter_model.safetensors"],
    ),
    "cut": (_cut, ["adapter_model.safetensors"]),
    "unknown": (_add_unknown_modules, ["0.self_attn.z_proj", "1.mlp.w_proj"]),
    "shape": (_change_shapes, ["0.self_attn.q_proj", "1.mlp.up_proj", "31"]),
    "rank": (_enlarge, ["rank 9", "max_lora_rank"]),
}
"""Name -> what breaks a good adapter, and what the message must say."""


def test_more_adapters_than_host_places_are_read_again(tmp_path):
    model = tiny_model()
    oracle = Oracle(model)
    config = LoRAConfig(max_loras=2, max_cpu_loras=2, max_lora_rank=4)
    manager = LRUCacheLoRAModelManager(model, config)
    engine = Engine(model, manager, max_num_seqs=3, max_model_len=16)
    adapters = {}
    for index, name in enumerate(NAMES[:5]):
        folder = write_adapter(tmp_path / name, seed=index + 1)
        adapters[name] = engine.adapters.add(name, folder)
    asked = [
        GenerationRequest(f"{name}-{turn}", (7, 8, 9), lora=name, max_tokens=4)
        for turn in range(2)
        for name in adapters
    ]
    for request, result in zip(asked, engine.generate(asked), strict=True):
        expected = oracle.greedy((7, 8, 9), adapters[request.lora], 4)
        assert result.token_ids == expected
    # A folder that has other contents by now is not the adapter that was asked for.
    write_adapter(tmp_path / NAMES[0], seed=99)
    results = engine.generate(asked)
    changed = [r.lora for r in results if r.finish_reason == "error"]
    assert changed == [NAMES[0]] * 2
    assert "has changed on disk" in results[0].error


REAL_TOKENS = 32
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue?",
    "Write a sentence about a cat.",
)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """SmolLM2 with eight PEFT adapters, and what each row answers alone in torch."""
    root = tmp_path_factory.mktemp("peft")
    model = load_model("smollm2-135m")
    tokenizer = load_tokenizer("smollm2-135m")
    requests = [
        GenerationRequest(
            f"r{index}",
            tuple(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": QUESTIONS[index % len(QUESTIONS)]}]
                )
            ),
            lora=name,
            max_tokens=REAL_TOKENS,
            prompt_logprobs=True,
        )
        for index, name in enumerate([*NAMES, None, NAMES[0], None])
    ]
    with warnings.catch_warnings():
        expected = answers_of_peft(tokenizer.folder, root, requests)
    config = LoRAConfig(max_loras=SLOTS, max_cpu_loras=12, max_lora_rank=16)
    manager = LRUCacheLoRAModelManager(model, config)
    longest = max(len(request.prompt_token_ids) for request in requests)
    engine = Engine(
        model,
        manager,
        max_num_seqs=4,
        max_model_len=longest + REAL_TOKENS,
        prefill_lengths=[longest],
    )
    for name in NAMES:
        engine.adapters.add(name, root / name)
    return House(engine, manager, requests, expected)


def answers_of_peft(folder, root, requests):
    """Saves the adapters under `root`, and runs each request alone."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    # transformers warns of an attribute that PEFT reads.
    warnings.simplefilter("ignore", FutureWarning)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=[target.rpartition(".")[2] for target in ALL],
    )
    peft_model: PeftModel = get_peft_model(base, config, adapter_name=NAMES[0])
    for name in NAMES[1:]:
        peft_model.add_adapter(name, config)
    for name, weight in peft_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    peft_model.save_pretrained(root)
    # PEFT writes the adapter named "default" alone into the folder itself.
    assert {path.name for path in root.iterdir() if path.is_dir()} >= set(NAMES)
    return {r.request_id: _answer_alone(peft_model.eval(), r) for r in requests}


def _answer_alone(peft_model, request):
    import torch

    prompt = torch.tensor([request.prompt_token_ids])
    peft_model.set_adapter(request.lora or NAMES[0])
    with torch.no_grad():
        if request.lora is None:
            with peft_model.disable_adapter():
                return _greedy_and_scores(peft_model, prompt)
        return _greedy_and_scores(peft_model, prompt)


def _greedy_and_scores(model, prompt):
    import torch

    output = model(input_ids=prompt, use_cache=True)
    scores = output.logits[0, :-1].log_softmax(-1)
    scores = scores.gather(1, prompt[0, 1:, None])[:, 0].numpy()
    tokens, cache = [], output.past_key_values
    while True:
        tokens.append(int(output.logits[0, -1].argmax()))
        if len(tokens) == REAL_TOKENS:
            return tuple(tokens), scores
        token = torch.tensor([tokens[-1:]])
        output = model(input_ids=token, past_key_values=cache, use_cache=True)


@pytest.mark.slow
@pytest.mark.torch
def test_a_real_model_answers_as_transformers_and_peft_do_row_by_row(real):
    assert_all_differ(real)
    for seed in range(2):
        order = random.Random(seed).sample(real.requests, len(real.requests))
        assert_right(real, order, real.engine.generate(order))


@pytest.mark.slow
@pytest.mark.torch
def test_a_real_model_compiles_nothing_for_another_adapter(real, tmp_path):
    real.engine.generate(real.requests)
    real.engine.generate([r for r in real.requests if r.lora is None])
    other = _cut_down(tmp_path, real)
    with CompilationCounter() as counter:
        real.engine.adapters.add("other", other)
        asked = [dataclasses.replace(r, lora="other") for r in real.requests[:1]]
        real.engine.generate([*asked, *real.requests[1:]])
        assert_right(real, real.requests, real.engine.generate(real.requests))
    assert counter.programs == []


def _cut_down(root, house):
    """An adapter of rank 8 on the attention of the first layers only."""
    rng = np.random.default_rng(5)
    from safetensors.numpy import save_file

    tensors = {}
    for layer in range(10):
        for target, d_out in (("q_proj", 576), ("v_proj", 192)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            a, b = rng.normal(size=(8, 576)) / 24, rng.normal(size=(d_out, 8)) * 0.05
            tensors[f"{key}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{key}.lora_B.weight"] = b.astype(np.float32)
    save_file(tensors, root / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8}
    config["target_modules"] = ["q_proj", "v_proj"]
    (root / "adapter_config.json").write_text(json.dumps(config))
    return root
