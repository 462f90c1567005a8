"""From requests to active adapters: load, check, register, activate.

Loading comes first, for all adapters that a call needs: a bad one evicts nobody. What
has been loaded takes its place under one lock, between two steps of the model.

Threads: every method may be called from any thread. Reading and packing overlap freely;
changes of the tables and writes to the bank happen one at a time, on the thread that
calls `add_adapter` or `set_active_adapters`. The model's own call is not part of this:
run it on a snapshot, or on the thread that makes the changes.

Source: vLLM's `WorkerLoRAManager` and `LRUCacheWorkerLoRAManager`.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

from lora_jax.manager import LoRAModelManager
from lora_jax.manager.prepared import Prepared
from lora_jax.request import LoRARequest
from lora_jax.routing import LoRAMapping
from lora_jax.shapes import BASE_ID
from lora_jax.worker.loading import Loader

LOAD_THREADS = 2
"""Background loads at once: one reads from disk while the other packs."""


class WorkerLoRAManager:
    """Keeps exactly the requested adapters: what a batch does not name is removed.

    Args:
      manager: whose adapters are served; any of the two managers.
      load_threads: how many background loads run at once.

    Example:
      >>> from flax import nnx
      >>> from lora_jax import LoRAConfig, LoRAModelManager
      >>> model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
      >>> with WorkerLoRAManager(LoRAModelManager(model, LoRAConfig())) as worker:
      ...     worker.set_active_adapters([], None)
      ...     worker.list_adapters()
      set()
    """

    _too_many: ClassVar[str] = (
        "Number of requested models ({wanted}) is greater than the number of GPU model "
        "slots ({slots})."
    )

    def __init__(
        self, manager: LoRAModelManager, *, load_threads: int = LOAD_THREADS
    ) -> None:
        self.manager = manager
        self._lock = manager.lock
        self._loader = Loader(manager, threads=load_threads, keep=manager.capacity)
        self._reloaded: set[LoRARequest] = set()
        self._keeps_dummy = False
        self._dummy: Prepared | None = None

    def __enter__(self) -> "WorkerLoRAManager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the background threads. Adapters stay as they are."""
        self._loader.close()

    @property
    def is_enabled(self) -> bool:
        """Always True; vLLM's engine asks."""
        return True

    def supports_tower_connector_lora(self) -> bool:
        """Says whether adapters of the vision tower and the connector are served."""
        return self.manager.supports_tower_connector_lora

    def prefetch(self, request: LoRARequest) -> Future[Prepared]:
        """Starts to load an adapter in the background and returns at once.

        Reads, checks and packs it, and starts its copy to the device. It takes its
        place when `add_adapter` or `set_active_adapters` asks for it, which then does
        not read. However many ask, it is read once; if that fails, all who wait get the
        error, and the next to ask tries again.

        Returns:
          A future that is done when the adapter is ready.
        """
        with self._lock:
            present = self.manager.prepared(request.lora_int_id)
            if present is None or request.load_inplace:
                return self._loader.start(request)
        ready: Future[Prepared] = Future()
        ready.set_result(present)
        return ready

    def add_adapter(self, request: LoRARequest) -> bool:
        """Loads an adapter if it is not registered, and activates it.

        With `load_inplace` the folder is read again and the new version takes the
        place of the old, under the same id and with its pin.

        Returns:
          True if it was loaded; False if it was registered already, and for
          `LRUCacheWorkerLoRAManager` True then too.
        Raises:
          AdapterNotFoundError, AdapterError: if it cannot be loaded; nothing has
            changed.
          ValueError, RuntimeError: if there is no room; nothing has changed.
        """
        with self._lock:
            present = self.manager.prepared(request.lora_int_id) is not None
            if present and not request.load_inplace:
                return self._use_again(request)
        prepared = self._loader.load(request)
        with self._lock:
            self._place(request, prepared)
        return True

    def set_active_adapters(
        self, requests: Iterable[LoRARequest], mapping: LoRAMapping | None
    ) -> None:
        """Makes all requested adapters active at once, then sets the batch's mapping.

        A request with `load_inplace` is read again the first time that it is seen here
        or by `add_adapter`, not at every step.

        Raises:
          RuntimeError: if there are more adapters than slots, or pinned and held ones
            leave too few; nothing has changed.
          AdapterNotFoundError, AdapterError: if one cannot be loaded; nothing has
            changed.
          KeyError: if the mapping names an id that is neither requested nor in a slot;
            nothing has changed.
        """
        wanted = {request.lora_int_id: request for request in requests}
        self._check_count(len(wanted))
        self._check_mapping(wanted, mapping)
        loaded: dict[int, Prepared] = {}
        while not self._try_apply(wanted, loaded, mapping):
            for id in self._missing(wanted, loaded):
                loaded[id] = self._loader.load(wanted[id])

    def add_dummy_lora(self, request: LoRARequest, rank: int) -> bool:
        """Registers an adapter of zeros under a request's id; False if it is taken.

        Inside `dummy_lora_cache` all dummies share the host copy of the first.
        """
        with self._lock:
            id = request.lora_int_id
            if self.manager.prepared(id) is not None:
                return False
            if self._dummy is None:
                made = self.manager.prepare(self.manager.create_dummy_lora(id, rank))
                self._dummy = made if self._keeps_dummy else None
            else:
                made = replace(self._dummy, adapter=replace(self._dummy.adapter, id=id))
            return self.manager.add_prepared(made)

    @contextmanager
    def dummy_lora_cache(self) -> Iterator[None]:
        """While it is entered, `add_dummy_lora` packs once and reuses the result."""
        self._keeps_dummy = True
        try:
            yield
        finally:
            self._keeps_dummy, self._dummy = False, None

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forgets an adapter everywhere; False if it was not registered."""
        with self._lock:
            self._forget_reloads(adapter_id)
            return self.manager.remove_adapter(adapter_id)

    def remove_all_adapters(self) -> None:
        """Forgets every adapter, pinned ones too."""
        with self._lock:
            self._reloaded.clear()
            self.manager.remove_all_adapters()

    def pin_adapter(self, adapter_id: int) -> bool:
        """Activates an adapter if needed and keeps it from eviction (LRU manager)."""
        return self.manager.pin_adapter(adapter_id)

    def list_adapters(self) -> set[int]:
        """Returns the ids of the registered adapters."""
        return set(self.manager.list_adapters())

    def _try_apply(
        self,
        wanted: dict[int, LoRARequest],
        loaded: dict[int, Prepared],
        mapping: LoRAMapping | None,
    ) -> bool:
        """Applies a batch if nothing is missing, which another thread may remove."""
        with self._lock:
            if self._missing(wanted, loaded):
                return False
            self._apply(wanted, loaded)
            if mapping is not None:
                self.manager.set_adapter_mapping(mapping)
            return True

    def _missing(
        self, wanted: dict[int, LoRARequest], loaded: dict[int, Prepared]
    ) -> list[int]:
        return [id for id in wanted if id not in loaded and self._must_load(wanted[id])]

    def _must_load(self, request: LoRARequest) -> bool:
        if request.load_inplace and request not in self._reloaded:
            return True
        return self.manager.prepared(request.lora_int_id) is None

    def _check_count(self, wanted: int) -> None:
        slots = self.manager.lora_slots
        if wanted > slots:
            raise RuntimeError(self._too_many.format(wanted=wanted, slots=slots))

    def _check_mapping(
        self, wanted: dict[int, LoRARequest], mapping: LoRAMapping | None
    ) -> None:
        named = {*mapping.index_mapping, *mapping.prompt_mapping} if mapping else set()
        absent = named - wanted.keys() - set(self.manager.lora_index_to_id)
        absent = {id for id in absent if id > BASE_ID}
        if absent:
            raise KeyError(
                f"adapters {sorted(absent)} of the mapping are neither requested nor "
                "active; add their requests."
            )

    def _apply(
        self, wanted: dict[int, LoRARequest], loaded: dict[int, Prepared]
    ) -> None:
        self.manager.check_batch_alone(wanted, loaded)
        for id in self.list_adapters() - wanted.keys():
            self.remove_adapter(id)
        for id, request in wanted.items():
            if id in loaded:
                self._place(request, loaded[id])
            else:
                self.manager.activate_adapter(id)

    def _place(self, request: LoRARequest, prepared: Prepared) -> None:
        """Gives a loaded adapter its place in both tiers."""
        id = request.lora_int_id
        if request.load_inplace and self.manager.prepared(id) is not None:
            self._reload(id, prepared)
        else:
            self.manager.load_prepared(prepared)
        if request.load_inplace:
            self._reloaded.add(request)
        self._loader.done(request)

    def _reload(self, id: int, prepared: Prepared) -> None:
        if self.manager.can_activate([id]):
            self.manager.replace_prepared(prepared)
        self.manager.activate_adapter(id)

    def _use_again(self, request: LoRARequest) -> bool:
        return False

    def _forget_reloads(self, id: int) -> None:
        self._reloaded = {r for r in self._reloaded if r.lora_int_id != id}


class LRUCacheWorkerLoRAManager(WorkerLoRAManager):
    """Keeps what was requested before, as far as there is room."""

    _too_many: ClassVar[str] = (
        "Number of requested LoRAs ({wanted}) is greater than the number of GPU LoRA "
        "slots ({slots})."
    )

    def _apply(
        self, wanted: dict[int, LoRARequest], loaded: dict[int, Prepared]
    ) -> None:
        self.manager.check_batch(wanted, loaded)
        # One of the batch may evict another from the host before its turn comes.
        present = {
            id: self.manager.prepared(id) for id in wanted.keys() - loaded.keys()
        }
        for id, request in wanted.items():
            kept = present.get(id)
            if id in loaded:
                self._place(request, loaded[id])
            elif kept is not None and self.manager.prepared(id) is None:
                self.manager.load_prepared(kept)
            else:
                self._use_again(request)

    def _use_again(self, request: LoRARequest) -> bool:
        self.manager.get_adapter(request.lora_int_id)
        self.manager.activate_adapter(request.lora_int_id)
        return True
