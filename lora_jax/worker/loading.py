"""A request -> an adapter ready for the model, read once however many ask.

    ask --> flight (one for each folder and id) --> Prepared, or the error, for everyone

A flight is flown by the thread that waits for it, or by a background thread after
`start`. A failed flight is gone at once: the next to ask tries again. A finished one
waits until it is taken; no more than `keep` do, the oldest is dropped. Knows no slots:
nothing here changes a table or writes to the device's bank.
"""

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from lora_jax.adapters import load_adapter
from lora_jax.errors import AdapterNotFoundError
from lora_jax.manager import LoRAModelManager
from lora_jax.manager.prepared import Prepared
from lora_jax.models.expert_parallel import local_experts
from lora_jax.request import LoRARequest

FlightKey = tuple[int, str, bool]
"""Id, path, and whether it is a reload: those read the folder as it is now."""


class Loader:
    """Reads, checks and packs adapters for one manager.

    Args:
      manager: for whose model adapters are prepared.
      threads: how many background loads run at once.
      keep: how many finished ones wait to be taken.
    """

    def __init__(self, manager: LoRAModelManager, *, threads: int, keep: int) -> None:
        self._manager = manager
        self._lock = threading.Lock()
        self._flights: OrderedDict[FlightKey, Future[Prepared]] = OrderedDict()
        self._keep = keep
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lora-load")

    def start(self, request: LoRARequest) -> Future[Prepared]:
        """Returns the flight of a request, flown in the background; never blocks."""
        flight, is_new = self._flight(request)
        if is_new:
            self._pool.submit(self._fly, request, flight, True)
        return flight

    def load(self, request: LoRARequest) -> Prepared:
        """Returns the prepared adapter; reads it here if nobody does so already.

        Raises:
          AdapterNotFoundError: if there is no adapter at the path.
          AdapterError: if it cannot be read, or served by the model.
        """
        flight, is_new = self._flight(request)
        if is_new:
            self._fly(request, flight, False)
        return flight.result()

    def done(self, request: LoRARequest) -> None:
        """Forgets a flight, whose result has arrived where it should."""
        with self._lock:
            self._flights.pop(_key(request), None)

    def waiting(self) -> int:
        """Returns how many flights there are, flying or finished."""
        with self._lock:
            return len(self._flights)

    def close(self) -> None:
        """Ends the background threads, after the loads that they are at."""
        self._pool.shutdown(cancel_futures=True)

    def _flight(self, request: LoRARequest) -> tuple[Future[Prepared], bool]:
        with self._lock:
            key = _key(request)
            if key in self._flights:
                return self._flights[key], False
            self._flights[key] = Future()
            self._drop_finished()
            return self._flights[key], True

    def _drop_finished(self) -> None:
        finished = [key for key, flight in self._flights.items() if flight.done()]
        for key in finished[: len(finished) - self._keep]:
            del self._flights[key]

    def _fly(
        self, request: LoRARequest, flight: Future[Prepared], to_device: bool
    ) -> None:
        start = time.perf_counter()
        try:
            prepared = read_request(request, self._manager)
            if to_device:
                prepared = self._manager.send(prepared)
        except BaseException as error:
            self._count(time.perf_counter() - start, failed=True)
            self.done(request)
            flight.set_exception(error)
        else:
            self._count(time.perf_counter() - start, failed=False)
            flight.set_result(prepared)

    def _count(self, seconds: float, *, failed: bool) -> None:
        stats = self._manager.stats
        with self._lock:
            stats.loads += not failed
            stats.load_failures += failed
            stats.load_seconds += seconds
            stats.last_load_seconds = seconds


def read_request(request: LoRARequest, manager: LoRAModelManager) -> Prepared:
    """Returns the adapter that a request names, checked and packed for the model.

    Of experts that are spread over processes, only those held here are read.

    Raises:
      AdapterNotFoundError: if there is no adapter at the path.
      AdapterError: if it cannot be read, or served by the model.
    """
    try:
        adapter = load_adapter(
            request.lora_path,
            request.lora_int_id,
            name=request.lora_name,
            max_lora_rank=manager.config.max_lora_rank,
            local_experts=local_experts(manager.model),
        )
    except FileNotFoundError as error:
        raise AdapterNotFoundError(
            f"Loading lora {request.lora_name} failed: No adapter found for "
            f"{request.lora_path}"
        ) from error
    return manager.prepare(adapter)


def _key(request: LoRARequest) -> FlightKey:
    return request.lora_int_id, request.lora_path, request.load_inplace
