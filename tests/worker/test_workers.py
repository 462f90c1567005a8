"""The workers: recorded trace, load before evict, reload once, one load for many."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from helpers import TOLERANCE, Toy, expected_rows, inputs, make_adapter
from lora_jax.adapters import load_adapter
from lora_jax.config import LoRAConfig
from lora_jax.errors import AdapterError, AdapterNotFoundError
from lora_jax.manager import LoRAModelManager, LRUCacheLoRAModelManager
from lora_jax.request import LoRARequest
from lora_jax.routing import LoRAMapping
from lora_jax.worker import LRUCacheWorkerLoRAManager, WorkerLoRAManager
from manager_traces import LRU_WORKER, WorkerStep, read_worker_steps
from saved_adapters import save_adapter

WORKERS = [
    (WorkerLoRAManager, LoRAModelManager),
    (LRUCacheWorkerLoRAManager, LRUCacheLoRAModelManager),
]
KINDS = pytest.mark.parametrize(("kind", "manager_kind"), WORKERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for id in range(1, 15):
        save_adapter(root / str(id), make_adapter(id, 1 + id % 8))
    (root / "broken").mkdir()
    (root / "broken" / "adapter_config.json").write_text("{")
    return root


def _request(folder: Path, id: int, **options: object) -> LoRARequest:
    return LoRARequest(f"a{id}", id, str(folder / str(id)), **options)


def _worker(
    kind: type[WorkerLoRAManager] = LRUCacheWorkerLoRAManager,
    manager_kind: type[LoRAModelManager] = LRUCacheLoRAModelManager,
    slots: int = 2,
    capacity: int = 3,
) -> WorkerLoRAManager:
    config = LoRAConfig(max_loras=slots, max_cpu_loras=capacity, max_lora_rank=8)
    return kind(manager_kind(Toy(), config))


@pytest.fixture
def lru() -> Iterator[WorkerLoRAManager]:
    with _worker() as worker:
        yield worker


def _state(worker: WorkerLoRAManager) -> tuple[object, ...]:
    manager = worker.manager
    return manager.lora_index_to_id, list(manager.list_adapters())


def _run(worker: WorkerLoRAManager, *ids: int) -> np.ndarray:
    worker.manager.set_adapter_mapping(LoRAMapping(ids, ids))
    return np.asarray(worker.manager.model(inputs(len(ids))))


def test_the_recorded_trace_comes_out_exactly(folder: Path) -> None:
    with _worker(slots=4, capacity=4) as worker:
        for step in read_worker_steps(LRU_WORKER):
            requests = [_request(folder, id) for id in step.ids]
            try:
                worker.set_active_adapters(requests, None)
                result = "ok"
            except RuntimeError as error:
                result = type(error).__name__
            assert WorkerStep(step.ids, result, *_state(worker)) == step


def test_the_base_worker_keeps_exactly_what_is_requested(folder: Path) -> None:
    with _worker(WorkerLoRAManager, LoRAModelManager, slots=3) as worker:
        for ids, slots in [
            ([1, 2], [1, 2, None]),
            ([2, 3], [3, 2, None]),
            ([4, 5, 6], [4, 5, 6]),
            ([], [None] * 3),
        ]:
            worker.set_active_adapters([_request(folder, id) for id in ids], None)
            assert worker.manager.lora_index_to_id == slots
            assert worker.list_adapters() == set(ids)


@KINDS
def test_a_batch_is_served_from_requests(
    folder: Path,
    kind: type[WorkerLoRAManager],
    manager_kind: type[LoRAModelManager],
) -> None:
    with _worker(kind, manager_kind) as worker:
        requests = [_request(folder, id) for id in (1, 2)]
        worker.set_active_adapters(requests, LoRAMapping((2, 0, 1), (2, 0, 1)))
        got = np.asarray(worker.manager.model(inputs(3)))
        adapters = [load_adapter(folder / str(id), id) for id in (2, 1)]
        expected = expected_rows(Toy(), [adapters[0], None, adapters[1]], inputs(3))
        np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("kind", "manager_kind", "text"),
    [
        (*WORKERS[0], r"requested models \(3\) .* number of GPU model slots \(2\)\.$"),
        (*WORKERS[1], r"requested LoRAs \(3\) .* number of GPU LoRA slots \(2\)\.$"),
    ],
)
def test_more_adapters_than_slots_name_both_numbers(
    folder: Path,
    kind: type[WorkerLoRAManager],
    manager_kind: type[LoRAModelManager],
    text: str,
) -> None:
    with _worker(kind, manager_kind) as worker:
        worker.set_active_adapters([_request(folder, 1)], None)
        with pytest.raises(RuntimeError, match=text):
            worker.set_active_adapters([_request(folder, id) for id in (2, 3, 4)], None)
        assert _state(worker) == ([1, None], [1])


@KINDS
@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ("absent", AdapterNotFoundError, "Loading lora bad failed: No adapter found"),
        ("broken", AdapterError, "adapter_config.json"),
    ],
)
def test_a_failing_load_evicts_nothing_and_fails_again(
    folder: Path,
    kind: type[WorkerLoRAManager],
    manager_kind: type[LoRAModelManager],
    bad: str,
    error: type[Exception],
    text: str,
) -> None:
    with _worker(kind, manager_kind, capacity=2) as worker:
        worker.set_active_adapters([_request(folder, id) for id in (1, 2)], None)
        state, request = _state(worker), LoRARequest("bad", 9, str(folder / bad))
        for _ in range(2):
            with pytest.raises(error, match=text):
                worker.add_adapter(request)
            with pytest.raises(error, match=text):
                worker.set_active_adapters([_request(folder, 3), request], None)
            with pytest.raises(error, match=text):
                worker.prefetch(request).result()
        assert _state(worker) == state
        assert worker.manager.stats.load_failures == 6


def test_adding_again_is_true_for_the_lru_worker_and_false_for_the_other(
    folder: Path,
) -> None:
    for kind, manager_kind in WORKERS:
        with _worker(kind, manager_kind) as worker:
            assert worker.add_adapter(_request(folder, 1))
            again = worker.add_adapter(_request(folder, 1))
            assert again is (kind is LRUCacheWorkerLoRAManager)


def test_a_reload_reads_once_keeps_id_and_pin_and_serves_the_new_weights(
    tmp_path: Path, lru: WorkerLoRAManager
) -> None:
    request = LoRARequest("x", 1, str(tmp_path / "x"))
    again = LoRARequest("x", 1, str(tmp_path / "x"), load_inplace=True)
    old, new, newest = (make_adapter(seed, 4, adapter_id=1) for seed in (1, 2, 3))
    save_adapter(tmp_path / "x", old)
    lru.add_adapter(request)
    lru.pin_adapter(1)
    save_adapter(tmp_path / "x", new)
    for _ in range(5):
        lru.set_active_adapters([again], None)
    assert lru.manager.stats.loads == 2
    expected = expected_rows(Toy(), [new, None], inputs(2))
    np.testing.assert_allclose(_run(lru, 1, 0), expected, atol=TOLERANCE, rtol=0)
    save_adapter(tmp_path / "x", newest)
    assert lru.add_adapter(again)
    expected = expected_rows(Toy(), [newest, None], inputs(2))
    np.testing.assert_allclose(_run(lru, 1, 0), expected, atol=TOLERANCE, rtol=0)
    assert lru.manager.is_pinned(1)
    assert lru.manager.lora_index_to_id == [1, None]


def test_a_failing_reload_keeps_the_old_version(
    tmp_path: Path, lru: WorkerLoRAManager
) -> None:
    save_adapter(tmp_path / "x", make_adapter(1, 4, adapter_id=1))
    lru.add_adapter(LoRARequest("x", 1, str(tmp_path / "x")))
    before = _run(lru, 1, 0)
    (tmp_path / "x" / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(AdapterError, match="adapter_model"):
        lru.add_adapter(LoRARequest("x", 1, str(tmp_path / "x"), load_inplace=True))
    np.testing.assert_array_equal(_run(lru, 1, 0), before)


def test_two_ids_with_one_name_are_both_served(
    folder: Path, lru: WorkerLoRAManager
) -> None:
    requests = [LoRARequest("same", id, str(folder / str(id))) for id in (1, 2)]
    lru.set_active_adapters(set(requests), None)
    adapters = [load_adapter(folder / str(id), id) for id in (1, 2)]
    expected = expected_rows(Toy(), adapters, inputs(2))
    np.testing.assert_allclose(_run(lru, 1, 2), expected, atol=TOLERANCE, rtol=0)


def test_pins_and_holds_are_respected_before_anything_happens(
    folder: Path, lru: WorkerLoRAManager
) -> None:
    lru.set_active_adapters([_request(folder, id) for id in (1, 2)], None)
    lru.pin_adapter(1)
    state = _state(lru)
    with pytest.raises(RuntimeError, match=r"^All items are pinned"):
        lru.set_active_adapters([_request(folder, id) for id in (3, 4)], None)
    assert _state(lru) == state
    lru.manager.hold(2)
    with pytest.raises(RuntimeError, match="pinned or held by running requests"):
        lru.add_adapter(_request(folder, 3))
    assert _state(lru) == state


def test_a_member_of_the_batch_that_another_evicts_is_not_read_again(
    folder: Path,
) -> None:
    with _worker(slots=2, capacity=2) as worker:
        worker.set_active_adapters([_request(folder, id) for id in (1, 2)], None)
        worker.set_active_adapters([_request(folder, id) for id in (3, 1)], None)
        assert _state(worker) == ([3, 1], [3, 1])
        assert worker.manager.stats.loads == 3


def test_a_mapping_of_ids_that_nobody_requests_changes_nothing(
    folder: Path, lru: WorkerLoRAManager
) -> None:
    lru.set_active_adapters([_request(folder, 1)], LoRAMapping((1, 0), (1, 0)))
    state = _state(lru)
    with pytest.raises(KeyError, match=r"adapters \[4\] of the mapping are neither"):
        lru.set_active_adapters([_request(folder, 2)], LoRAMapping((2, 4), (2, 4)))
    assert _state(lru) == state


def test_removal_by_id_and_of_all(folder: Path, lru: WorkerLoRAManager) -> None:
    lru.set_active_adapters([_request(folder, id) for id in (1, 2)], None)
    assert [lru.remove_adapter(1), lru.remove_adapter(1)] == [True, False]
    lru.remove_all_adapters()
    assert lru.list_adapters() == set()
    assert lru.is_enabled


def test_dummies_share_one_host_copy(folder: Path, lru: WorkerLoRAManager) -> None:
    with lru.dummy_lora_cache():
        assert [lru.add_dummy_lora(_request(folder, id), 8) for id in (1, 2, 1)] == [
            True,
            True,
            False,
        ]
    assert lru.add_dummy_lora(_request(folder, 3), 8)
    copies = [lru.manager.prepared(id).packed for id in (1, 2, 3)]
    assert copies[0] is copies[1] is not copies[2]
    assert [a.id for a in lru.manager.list_adapters().values()] == [1, 2, 3]


@KINDS
def test_a_reload_of_a_held_adapter_needs_a_slot_more_and_says_so_first(
    kind: type[WorkerLoRAManager],
    manager_kind: type[LoRAModelManager],
    tmp_path: Path,
) -> None:
    save_adapter(tmp_path / "x", make_adapter(1, 4))
    save_adapter(tmp_path / "y", make_adapter(2, 4))
    plain = [LoRARequest(n, i, str(tmp_path / n)) for n, i in (("x", 1), ("y", 2))]
    again = LoRARequest("x", 1, str(tmp_path / "x"), load_inplace=True)
    with _worker(kind, manager_kind, slots=2) as worker:
        worker.set_active_adapters(plain, None)
        hold = worker.manager.hold(1)
        before = _state(worker)
        save_adapter(tmp_path / "x", make_adapter(3, 4))
        with pytest.raises((ValueError, RuntimeError)):
            worker.set_active_adapters([plain[1], again], None)
        assert _state(worker) == before
        worker.manager.release(hold)
        worker.set_active_adapters([plain[1], again], None)
        assert set(worker.manager.lora_index_to_id) == {1, 2}
