"""The engine on a tiny random Llama, each row against the float64 oracle."""

import dataclasses
import random

import numpy as np
import pytest

from lora_jax import LoRAConfig, LRUCacheLoRAModelManager
from lora_jax.errors import ConfigError, RequestError
from lora_jax.serving import (
    CompilationCounter,
    Engine,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from tiny_llama import Oracle, tiny_adapter, tiny_model

NAMES = ("ada", "bob", "cyd")
TOKENS = 6
LOGPROB_TOLERANCE = 2e-4


@dataclasses.dataclass
class House:
    engine: Engine
    manager: LRUCacheLoRAModelManager
    oracle: Oracle
    adapters: dict


@pytest.fixture
def house(built):
    """The house with nobody in it: a failed test leaves nothing to the next."""
    yield built
    for request_id in list(built.engine._intake.in_flight):
        built.engine.cancel(request_id)
    built.engine.step()


@pytest.fixture(scope="module")
def built():
    """Three adapters in two slots, three rows; compiled once for all tests."""
    model = tiny_model()
    oracle = Oracle(model)
    config = LoRAConfig(max_loras=2, max_cpu_loras=4, max_lora_rank=8)
    manager = LRUCacheLoRAModelManager(model, config)
    adapters = {
        name: tiny_adapter(name, seed=index + 1, rank=2 + index)
        for index, name in enumerate(NAMES)
    }
    for adapter in adapters.values():
        manager.add_adapter(adapter)
    engine = Engine(
        model,
        manager,
        max_num_seqs=3,
        max_model_len=24,
        eos_ids=[],
        prefill_lengths=[16],
    )
    return House(engine, manager, oracle, {None: None, **adapters})


def prompt(seed, length):
    return tuple(np.random.default_rng(seed).integers(0, 61, length).tolist())


def requests(count, **options):
    """Requests that cycle through the base and all adapters."""
    names = (None, *NAMES)
    return [
        GenerationRequest(
            f"r{index}",
            prompt(index, 1 + (index * 5) % 16),
            lora=names[index % len(names)],
            max_tokens=TOKENS,
            **options,
        )
        for index in range(count)
    ]


def assert_right(house, asked, results):
    for request, result in zip(asked, results, strict=True):
        adapter = house.adapters[request.lora]
        expected = house.oracle.greedy(
            request.prompt_token_ids, adapter, request.max_tokens
        )
        assert result.request_id == request.request_id
        assert result.token_ids == expected, request
        if request.max_tokens:
            assert result.adapter_hash == (adapter and adapter.content_hash)


def test_each_row_gets_its_own_adapter_in_any_order(house):
    asked = requests(9)
    answers = set()
    for seed in range(2):
        random.Random(seed).shuffle(asked)
        results = house.engine.generate(asked)
        assert_right(house, asked, results)
        answers |= {result.token_ids for result in results}
    assert len(answers) > 5
    assert not house.engine.has_work


def test_prompt_logprobs_equal_the_oracle(house):
    asked = requests(5, prompt_logprobs=True)
    for request, result in zip(asked, house.engine.generate(asked), strict=True):
        assert result.prompt_logprobs[0] is None
        expected = house.oracle.prompt_logprobs(
            request.prompt_token_ids, house.adapters[request.lora]
        )
        found = np.asarray(result.prompt_logprobs[1:], np.float64)
        np.testing.assert_allclose(found, expected, atol=LOGPROB_TOLERANCE)


def test_only_requests_that_ask_get_prompt_logprobs(house):
    asked = requests(3)
    asked[1] = dataclasses.replace(asked[1], prompt_logprobs=True)
    results = house.engine.generate(asked)
    assert [r.prompt_logprobs is not None for r in results] == [False, True, False]
    assert_right(house, asked, results)


def test_nothing_compiles_after_warmup(house):
    house.engine.warmup(scored=True)
    asked = requests(6, prompt_logprobs=True)
    sampled = [
        dataclasses.replace(r, sampling=SamplingParams(0.9, 5, 0.8, seed=3))
        for r in asked
    ]
    extra = tiny_adapter("extra", seed=9, rank=7, targets=("self_attn.o_proj",))
    with CompilationCounter() as counter:
        house.manager.add_adapter(extra)
        house.engine.generate(
            [*sampled, GenerationRequest("extra", prompt(1, 9), lora="extra")]
        )
        for count in range(1, 7):
            house.engine.generate(asked[:count])
        house.manager.remove_adapter(extra.id)
    assert counter.programs == []


def test_nothing_compiles_after_warmup_of_a_new_engine():
    model = tiny_model()
    manager = LRUCacheLoRAModelManager(model, LoRAConfig(max_loras=1, max_lora_rank=4))
    engine = Engine(model, manager, max_num_seqs=1, max_model_len=16)
    engine.warmup([3])
    with CompilationCounter() as counter:
        manager.add_adapter(tiny_adapter("ada", seed=1))
        for name in (None, "ada", None, "ada"):
            engine.generate([GenerationRequest("r", (1, 2, 3), name, max_tokens=2)])
    assert counter.programs == []


def test_a_stop_token_ends_a_request_and_is_its_last_token(house):
    request = requests(2)[1]
    tokens = house.oracle.greedy(
        request.prompt_token_ids, house.adapters[request.lora], TOKENS
    )
    stop = tokens[2]
    first = tokens.index(stop)
    asked = dataclasses.replace(request, stop_token_ids=(stop,))
    (result,) = house.engine.generate([asked])
    assert result.token_ids == tokens[: first + 1]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_max_tokens_is_a_limit(house, max_tokens):
    asked = [dataclasses.replace(r, max_tokens=max_tokens) for r in requests(4)]
    results = house.engine.generate(asked)
    assert_right(house, asked, results)
    assert {result.finish_reason for result in results} == {FinishReason.LENGTH}


def test_a_prompt_can_be_scored_without_generating(house):
    asked = dataclasses.replace(requests(2)[1], max_tokens=0, prompt_logprobs=True)
    (result,) = house.engine.generate([asked])
    assert result.token_ids == ()
    assert len(result.prompt_logprobs) == len(asked.prompt_token_ids)


def test_generation_stops_where_the_cache_ends(house):
    asked = GenerationRequest("long", prompt(3, 16), lora="ada", max_tokens=100)
    (result,) = house.engine.generate([asked])
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 24 - 16
    expected = house.oracle.greedy(prompt(3, 16), house.adapters["ada"], 8)
    assert result.token_ids == expected


def test_random_rows_do_not_depend_on_the_batch(house):
    options = SamplingParams(temperature=1.5, top_k=20, top_p=0.95, seed=11)
    asked = [
        dataclasses.replace(r, sampling=dataclasses.replace(options, seed=11 + index))
        for index, r in enumerate(requests(5))
    ]
    together = {r.request_id: r.token_ids for r in house.engine.generate(asked)}
    alone = {
        r.request_id: r.token_ids for a in asked for r in house.engine.generate([a])
    }
    assert together == alone
    greedy = {r.request_id: r.token_ids for r in house.engine.generate(requests(5))}
    assert together != greedy


def test_steps_stream_every_token_once(house):
    asked = requests(5)
    for request in asked:
        house.engine.add_request(request)
    streamed = {request.request_id: [] for request in asked}
    results = {}
    while house.engine.has_work:
        for event in house.engine.step():
            streamed[event.request_id] += event.token_ids
            if event.result is not None:
                results[event.request_id] = event.result
    for request in asked:
        assert (
            tuple(streamed[request.request_id]) == results[request.request_id].token_ids
        )
    assert_right(house, asked, [results[request.request_id] for request in asked])


def test_a_cancelled_request_ends_and_the_others_go_on(house):
    asked = requests(6)
    for request in asked:
        house.engine.add_request(request)
    house.engine.step()
    house.engine.step()
    assert house.engine.cancel("r1")  # runs
    assert house.engine.cancel("r5")  # waits
    assert not house.engine.cancel("r1")
    assert not house.engine.cancel("nobody")
    results = {}
    while house.engine.has_work:
        for event in house.engine.step():
            if event.result is not None:
                results[event.request_id] = event.result
    assert results["r1"].finish_reason == results["r5"].finish_reason == "cancelled"
    assert 0 < len(results["r1"].token_ids) < TOKENS
    assert results["r5"].token_ids == ()
    rest = [request for request in asked if request.request_id not in ("r1", "r5")]
    assert_right(house, rest, [results[request.request_id] for request in rest])


def test_loads_between_steps_do_not_change_running_rows(house):
    """Hot loading while rows run: vLLM issue 47724."""
    asked = requests(3)  # base, ada, bob: both slots are in use
    for request in asked:
        house.engine.add_request(request)
    results = {}
    while house.engine.has_work:
        for event in house.engine.step():
            if event.result is not None:
                results[event.request_id] = event.result
        newcomer = tiny_adapter("newcomer", seed=100)
        house.manager.add_adapter(newcomer)
        assert house.manager.can_activate([newcomer.id]) != house.engine.has_work
        house.manager.remove_adapter(newcomer.id)
        house.manager.add_adapter(house.adapters["cyd"])
    assert_right(house, asked, [results[request.request_id] for request in asked])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"prompt_token_ids": ()}, "the prompt is empty"),
        ({"prompt_token_ids": (1, 61, -2)}, r"token ids \[-2, 61\] are outside"),
        ({"prompt_token_ids": (1,) * 17}, "the prompt has 17 tokens, at most 16 fit"),
        ({"max_tokens": -1}, "max_tokens -1"),
        ({"lora": "adda"}, "there is no adapter 'adda'; known: ada, bob, cyd"),
    ],
)
def test_an_impossible_request_is_refused_before_anything_runs(house, changes, fault):
    bad = dataclasses.replace(requests(1)[0], **changes)
    with pytest.raises(RequestError, match=fault):
        house.engine.add_request(bad)
    with pytest.raises(RequestError, match=fault):
        house.engine.generate([*requests(2)[1:], bad])
    assert not house.engine.has_work


def test_ids_must_differ(house):
    request = requests(1)[0]
    with pytest.raises(RequestError, match="another request has this id too"):
        house.engine.generate([request, request])
    house.engine.add_request(request)
    with pytest.raises(RequestError, match="a request with this id is in flight"):
        house.engine.add_request(request)
    with pytest.raises(RequestError, match="other requests are in flight"):
        house.engine.generate(requests(2)[1:])
    house.engine.cancel(request.request_id)
    house.engine.step()
    assert not house.engine.has_work


def test_when_every_slot_is_pinned_a_request_ends_with_an_error(house):
    model = tiny_model()
    manager = LRUCacheLoRAModelManager(model, LoRAConfig(max_loras=1, max_cpu_loras=2))
    for name in ("ada", "bob"):
        manager.add_adapter(house.adapters[name])
    manager.pin_adapter(house.adapters["ada"].id)
    engine = Engine(model, manager, max_num_seqs=1, max_model_len=16)
    engine.add_request(GenerationRequest("r", (1, 2), lora="bob"))
    (event,) = engine.step()
    assert event.result.finish_reason == "error"
    assert "can get no slot: all 1 are pinned" in event.result.error
    assert not engine.has_work


def test_an_engine_without_a_manager_knows_no_adapter():
    engine = Engine(tiny_model(), max_num_seqs=1, max_model_len=16)
    with pytest.raises(RequestError, match="no adapter 'ada'; no adapter is loaded"):
        engine.add_request(GenerationRequest("r", (1,), lora="ada"))


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_model_len": 65}, "max_model_len=65: expected between 1 and"),
        ({"max_model_len": 0}, "max_model_len=0"),
    ],
)
def test_an_impossible_engine_is_refused(options, fault):
    with pytest.raises(ConfigError, match=fault):
        Engine(tiny_model(), **options)
