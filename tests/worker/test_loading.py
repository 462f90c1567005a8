"""Background loading: one read for many, errors for all, nothing left behind."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from helpers import Toy, make_adapter
from lora_jax.config import LoRAConfig
from lora_jax.errors import AdapterNotFoundError
from lora_jax.manager import LRUCacheLoRAModelManager
from lora_jax.manager.prepared import Prepared
from lora_jax.request import LoRARequest
from lora_jax.rules import ALL_KEPT
from lora_jax.worker import LRUCacheWorkerLoRAManager, loading
from saved_adapters import save_adapter

THREADS = 8
SECONDS = 5.0


@pytest.fixture
def worker() -> Iterator[LRUCacheWorkerLoRAManager]:
    config = LoRAConfig(max_loras=2, max_cpu_loras=3, max_lora_rank=8)
    manager = LRUCacheLoRAModelManager(Toy(), config)
    with LRUCacheWorkerLoRAManager(manager) as worker:
        yield worker


class SlowReader:
    """Counts reads, and makes each wait until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads, self.go_on = 0, threading.Event()
        self._read = loading.read_request
        monkeypatch.setattr(loading, "read_request", self)

    def __call__(self, *arguments: object) -> Prepared:
        self.reads += 1
        assert self.go_on.wait(30)
        return self._read(*arguments)


def _request(folder: Path, id: int = 1) -> LoRARequest:
    return LoRARequest(f"a{id}", id, str(folder))


def test_a_prefetched_adapter_is_not_read_again(
    tmp_path: Path, worker: LRUCacheWorkerLoRAManager
) -> None:
    save_adapter(tmp_path, make_adapter(1, 4))
    ready = worker.prefetch(_request(tmp_path)).result()
    assert worker.list_adapters() == set()
    assert worker.manager.stats.writes == 0
    assert all(isinstance(array, jax.Array) for array in ready.ahead.values())
    (tmp_path / "adapter_model.safetensors").unlink()
    assert worker.add_adapter(_request(tmp_path))
    assert worker.manager.lora_index_to_id == [1, None]
    assert worker.manager.prepared(1).ahead is None
    assert worker.manager.stats.loads == 1


def test_a_prefetched_slot_equals_one_that_was_not(
    tmp_path: Path, worker: LRUCacheWorkerLoRAManager
) -> None:
    save_adapter(tmp_path, make_adapter(1, 3))
    worker.prefetch(_request(tmp_path)).result()
    worker.add_adapter(_request(tmp_path))
    worker.add_adapter(_request(tmp_path, 2))
    for leaf in jax.tree.leaves(worker.manager.bank):
        np.testing.assert_array_equal(leaf[0], leaf[1])
    assert worker.manager.bank.arrays["blocks.0.fc"]["a"].any()


def test_what_other_processes_hold_of_the_experts_is_not_read(
    tmp_path: Path,
    worker: LRUCacheWorkerLoRAManager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_adapter(tmp_path, make_adapter(1, 4))
    assert worker.prefetch(_request(tmp_path)).result().adapter.local_experts is None
    monkeypatch.setattr(loading, "local_experts", lambda model: range(2, 4))
    ready = worker.prefetch(_request(tmp_path, 2)).result()
    assert ready.adapter.local_experts == range(2, 4)


def test_prefetching_what_is_registered_is_done_at_once(
    tmp_path: Path, worker: LRUCacheWorkerLoRAManager
) -> None:
    save_adapter(tmp_path, make_adapter(1, 4))
    worker.add_adapter(_request(tmp_path))
    assert worker.prefetch(_request(tmp_path)).result() is worker.manager.prepared(1)
    assert worker.manager.stats.loads == 1


def test_prefetching_returns_at_once_and_many_askers_read_once(
    tmp_path: Path,
    worker: LRUCacheWorkerLoRAManager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_adapter(tmp_path, make_adapter(1, 4))
    reader, request = SlowReader(monkeypatch), _request(tmp_path)
    flights = [worker.prefetch(request) for _ in range(3)]
    with ThreadPoolExecutor(THREADS) as pool:
        added = [pool.submit(worker.add_adapter, request) for _ in range(THREADS)]
        time.sleep(0.05)
        assert not any(future.done() for future in (*flights, *added))
        reader.go_on.set()
        assert all(future.result() for future in added)
    assert reader.reads == 1
    assert worker._loader.waiting() == 0


def test_a_failure_reaches_all_who_wait_and_the_next_try_is_a_new_one(
    tmp_path: Path,
    worker: LRUCacheWorkerLoRAManager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, request = SlowReader(monkeypatch), _request(tmp_path / "late")
    flight = worker.prefetch(request)
    with ThreadPoolExecutor(THREADS) as pool:
        added = [pool.submit(worker.add_adapter, request) for _ in range(THREADS)]
        time.sleep(0.05)
        reader.go_on.set()
        for future in (flight, *added):
            with pytest.raises(AdapterNotFoundError, match="No adapter found for"):
                future.result()
    assert worker.list_adapters() == set()
    assert worker._loader.waiting() == 0
    save_adapter(tmp_path / "late", make_adapter(1, 4))
    assert worker.add_adapter(request)


def test_no_more_finished_loads_wait_than_the_host_may_hold(
    tmp_path: Path, worker: LRUCacheWorkerLoRAManager
) -> None:
    save_adapter(tmp_path, make_adapter(1, 2))
    for id in range(1, 9):
        worker.prefetch(_request(tmp_path, id)).result()
    assert worker._loader.waiting() <= worker.manager.capacity + 1


def test_eight_threads_load_unload_and_query_one_adapter(
    tmp_path: Path, worker: LRUCacheWorkerLoRAManager
) -> None:
    versions = [make_adapter(seed, 2 + seed, adapter_id=1) for seed in (1, 2)]
    for seed, version in enumerate(versions):
        save_adapter(tmp_path / str(seed), version)
    requests = [
        LoRARequest("x", 1, str(tmp_path / str(seed)), load_inplace=reload)
        for seed in (0, 1)
        for reload in (False, True)
    ]
    manager, stop = worker.manager, time.monotonic() + SECONDS

    refusals: set[str] = set()

    def query() -> None:
        try:
            hold = manager.hold(1)
        except KeyError:
            return
        try:
            bank = manager.snapshot().bank
            rank = {int(site["rank"][hold.slot].max()) for site in bank.arrays.values()}
            assert rank in ({3}, {4})
        finally:
            assert manager.release(hold)

    def load() -> None:
        try:
            worker.add_adapter(random.choice(requests))
        except RuntimeError as error:
            refusals.add(str(error))

    actions: list[Callable[[], object]] = [
        query,
        query,
        load,
        load,
        lambda: worker.prefetch(random.choice(requests)).result(),
        lambda: worker.remove_adapter(1),
        lambda: manager.list_adapters(),
        lambda: manager.can_load(1),
    ]

    def repeat(action: Callable[[], object]) -> int:
        done = 0
        while time.monotonic() < stop:
            action()
            done += 1
        return done

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(repeat, actions))
    assert refusals <= {ALL_KEPT}
    worker.remove_adapter(1)
    assert manager.lora_index_to_id == [None, None]
    assert not manager._table.holds
    assert not manager._table.retired
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(manager.bank))
