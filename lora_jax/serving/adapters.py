"""The adapters that requests may name, and their way into a slot when a row needs one.

    name -> id -> registered on the host (read again from its folder if it was evicted)
               -> held in a slot, for as long as a row uses it

The engine's side of the manager: it implements the scheduler's `AdapterGate`.
"""

import dataclasses
import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from lora_jax.adapters import Adapter, FullModule, load_adapter
from lora_jax.bank import Bank
from lora_jax.errors import AdapterError, ConfigError
from lora_jax.layers.table import EMBEDDINGS
from lora_jax.manager import LoRAModelManager
from lora_jax.slots import Hold

SHOWN_NAMES = 8
"""Known names in an error about an unknown one, at most."""


@dataclasses.dataclass(frozen=True)
class _Source:
    """A named adapter that can be read again."""

    id: int
    path: Path
    content_hash: str
    vocabulary: int | None


class ServedAdapters:
    """Names, and the manager behind them.

    An adapter is known by name if it was added here by path, or registered with the
    manager by anyone. Those added by path are read again when the manager's host tier
    has evicted them, so there may be more of them than `max_cpu_loras`.

    Args:
      manager: None if only the base model is served.
    """

    def __init__(self, manager: LoRAModelManager | None) -> None:
        self._manager = manager
        self._sources: dict[str, _Source] = {}
        self._names: dict[int, str] = {}

    @property
    def num_slots(self) -> int:
        """Slots of the bank; 0 without a manager."""
        return 0 if self._manager is None else self._manager.lora_slots

    @property
    def bank(self) -> Bank | None:
        """The bank to give to the next step."""
        return None if self._manager is None else self._manager.bank

    def add(self, name: str, path: str | os.PathLike[str]) -> Adapter:
        """Reads an adapter, registers it under `name`, and returns it.

        Raises:
          AdapterError: if it cannot be read or served; nothing has changed then.
          ConfigError: if there is no manager, or another path has this name.
        """
        manager = self._require_manager()
        if name in self._sources:
            raise ConfigError(
                f"adapter name {name!r} is taken by {self._sources[name].path}; names"
                " must differ."
            )
        limit = manager.config.max_lora_rank
        adapter = load_adapter(path, name=name, max_lora_rank=limit)
        manager.add_adapter(adapter)
        self._sources[name] = _Source(
            adapter.id, Path(path), adapter.content_hash, _vocabulary(adapter)
        )
        self._names[adapter.id] = name
        return adapter

    def names(self) -> list[str]:
        """Returns every name that a request may use, sorted."""
        registered = {} if self._manager is None else self._manager.list_adapters()
        return sorted({*self._sources, *(a.name for a in registered.values())})

    def find(self, name: str) -> int | None:
        """Returns the id behind a name; of several registered, the largest.

        A name that was added here is found at once, whatever the number of adapters.
        """
        if name in self._sources:
            return self._sources[name].id
        registered = {} if self._manager is None else self._manager.list_adapters()
        named = [id for id, adapter in registered.items() if adapter.name == name]
        return max(named, default=None)

    def vocabulary(self, name: str) -> int | None:
        """Returns how many tokens an adapter's own embedding knows, None without one.

        None too for a name that nobody has.
        """
        if name in self._sources:
            return self._sources[name].vocabulary
        adapter_id = self.find(name)
        return None if adapter_id is None else _vocabulary(self.get(adapter_id))

    def unknown(self, name: str) -> str:
        """Returns the text that says that nobody has this name, and who is there."""
        return f"there is no adapter {name!r}; {_known(name, self.names())}"

    def get(self, adapter_id: int) -> Adapter:
        """Returns an adapter that is registered, as it is while a row holds it."""
        adapter = self._require_manager().get_adapter(adapter_id)
        assert adapter is not None
        return adapter

    def warmup(self) -> None:
        """Compiles the writes to slots, unless adapters are registered already."""
        if self._manager is not None and not len(self._manager):
            self._manager.warmup((), lambda _: None)

    def can_acquire(self, adapter_id: int) -> bool:
        """Whether the adapter has, or can get, a slot without evicting a held one."""
        return self._require_manager().can_load(adapter_id)

    def acquire(self, adapter_id: int) -> Hold:
        """Registers the adapter again if needed, puts it into a slot and holds it.

        Raises:
          AdapterError: if its folder cannot be read any more or has other contents.
        """
        manager = self._require_manager()
        if manager.get_adapter(adapter_id) is None:
            manager.add_adapter(self._read_again(adapter_id))
        return manager.hold(adapter_id)

    def release(self, claim: Hold) -> None:
        """Ends a claim."""
        self._require_manager().release(claim)

    def is_pinned(self, adapter_id: int) -> bool:
        """Whether the adapter keeps its slot when no row uses it."""
        return self._require_manager().is_pinned(adapter_id)

    def _read_again(self, adapter_id: int) -> Adapter:
        name = self._names.get(adapter_id)
        if name is None:
            raise AdapterError(
                f"adapter {adapter_id} was removed and has no folder to read it from;"
                " add it again."
            )
        source = self._sources[name]
        adapter = load_adapter(source.path, adapter_id, name=name)
        if adapter.content_hash != source.content_hash:
            raise AdapterError(
                f"adapter {name!r} ({source.path}) has changed on disk since it was"
                " added; add the new one under another name."
            )
        return adapter

    def _require_manager(self) -> LoRAModelManager:
        if self._manager is None:
            raise ConfigError(
                "this engine serves the base model alone; give it a manager to serve"
                " adapters."
            )
        return self._manager


def _vocabulary(adapter: Adapter) -> int | None:
    tables = [
        part.weight.shape[0]
        for module, part in adapter.parts.items()
        if isinstance(part, FullModule) and module.rpartition(".")[2] in EMBEDDINGS
    ]
    return max(tables, default=None)


def _known(name: str, names: Sequence[str]) -> str:
    """Says which names there are, the similar ones first."""
    if not names:
        return "no adapter is loaded."
    similar = difflib.get_close_matches(name, names, n=SHOWN_NAMES)
    shown = [*similar, *(n for n in names if n not in similar)][:SHOWN_NAMES]
    more = len(names) - len(shown)
    return f"known: {', '.join(shown)}" + (f" and {more} more." if more else ".")
