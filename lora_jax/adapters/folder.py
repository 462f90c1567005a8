"""A folder -> the adapter's config and tensors as they lie on disk.

Knows file names and their limits; knows nothing of what config or tensors mean.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lora_jax.adapters.location import check_inside
from lora_jax.adapters.pickle_file import read_torch_file
from lora_jax.adapters.remote import is_remote
from lora_jax.adapters.safetensors_file import (
    Wanted,
    every,
    open_regular,
    read_safetensors,
)
from lora_jax.errors import AdapterError, AdapterNotFoundError

CONFIG_NAME = "adapter_config.json"

MAX_CONFIG_BYTES = 4 * 2**20
"""A config that lists 10 000 modules by full path has about 1 MB."""

MAX_SHARDS = 1000

Check = Callable[[Mapping[str, object]], None]

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Folder:
    """An adapter's folder, read.

    Attributes:
      path: the folder, or the file that was read alone.
      config: the parsed config.
      tensors: name -> read-only values.
      unread: names of the tensors of experts that other processes hold.
    """

    path: Path
    config: Mapping[str, object]
    tensors: Mapping[str, np.ndarray]
    unread: tuple[str, ...] = ()


class _Local:
    """Wants what this process holds, and remembers what it did not want."""

    def __init__(self, experts: range | None) -> None:
        self._experts = experts
        self.unread: dict[str, None] = {}  # A set in the order of the file.

    def __call__(self, name: str) -> bool:
        if is_remote(name, self._experts):
            self.unread[name] = None
            return False
        return True


def read_folder(
    path: Path,
    *,
    root: Path | None = None,
    check: Check | None = None,
    local_experts: range | None = None,
) -> Folder:
    """Reads an adapter's folder.

    Args:
      path: the folder.
      root: folder that every file must lie in, symbolic links followed; None for any.
      check: is given the config before the weights are read, and may refuse it.
      local_experts: tensors of one expert outside it are not read; None reads all.

    Raises:
      AdapterNotFoundError: if there is no config in it.
      AdapterError: if config or weights are missing, broken, too large, or outside.
    """
    if not (path / CONFIG_NAME).exists():
        raise AdapterNotFoundError(_no_config(path))
    if root is not None:
        for file in path.iterdir():
            check_inside(file, root)
    config = read_json(path / CONFIG_NAME)
    if check is not None:
        check(config)
    local = _Local(local_experts)
    for name, reader in READERS.items():
        if (path / name).exists():
            tensors = reader(path / name, local)
            return Folder(path, config, tensors, tuple(local.unread))
    raise AdapterError(
        f"adapter {path.name!r}: {path} doesn't contain tensors; expected "
        f"{' or '.join(READERS)}."
    )


def read_file(
    path: Path, *, root: Path | None = None, local_experts: range | None = None
) -> Folder:
    """Reads a single weights file; a config beside it is read too, none is needed.

    Arguments are as in `read_folder`.

    Raises:
      AdapterError: as `read_folder`.
    """
    beside = path.parent / CONFIG_NAME
    if root is not None:
        check_inside(path, root)
        check_inside(beside, root)
    reader = read_safetensors if path.suffix == ".safetensors" else read_torch_file
    config = read_json(beside) if beside.exists() else {}
    local = _Local(local_experts)
    tensors = reader(path, local)
    return Folder(path, config, tensors, tuple(local.unread))


def _no_config(path: Path) -> str:
    inside = sorted(str(file.parent) for file in path.glob(f"*/{CONFIG_NAME}"))
    advice = "give the folder that PEFT's save_pretrained wrote"
    if inside:
        more = ", ..." if len(inside) > 5 else ""
        advice = f"give one of the folders in it: {', '.join(inside[:5])}{more}"
    return f"adapter {path.name!r}: {path} holds no {CONFIG_NAME}; {advice}."


def read_shards(path: Path, wanted: Wanted = every) -> Tensors:
    """Returns the wanted tensors that an index of safetensors files lists.

    Raises:
      AdapterError: if the index and its files do not agree, or a file is elsewhere.
    """
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise AdapterError(f"{path}: has no weight_map from tensors to files.")
    files = {str(file) for file in listed.values()}
    strange = sorted(f for f in files if Path(f).name != f or "\\" in f or "\0" in f)
    if strange or len(files) > MAX_SHARDS:
        raise AdapterError(
            f"{path}: {strange[:3] or len(files)} are no names of files beside it."
        )
    tensors: Tensors = {}
    for name in sorted(files):
        for tensor, array in read_safetensors(path.parent / name, wanted).items():
            if listed.get(tensor) != name:
                raise AdapterError(f"{path}: {name} holds {tensor!r}, which it denies.")
            tensors[tensor] = array
    missing = sorted(name for name in set(listed) - set(tensors) if wanted(name))
    if missing:
        raise AdapterError(f"{path}: its files lack {', '.join(missing[:3])}.")
    return tensors


READERS: Mapping[str, Callable[[Path, Wanted], Tensors]] = {
    "adapter_model.safetensors": read_safetensors,
    "adapter_model.safetensors.index.json": read_shards,
    "adapter_model.bin": read_torch_file,
    "adapter_model.pt": read_torch_file,
    "adapters.safetensors": read_safetensors,
}
"""Weights files in order of precedence -> what reads them; the last is MLX-LM's."""


def read_json(path: Path) -> dict[str, object]:
    """Returns the JSON object of a small file.

    Raises:
      AdapterError: if it is too large, no JSON object, or repeats a key.
    """
    with open_regular(path) as file:
        text = file.read(MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise AdapterError(f"{path}: more than {MAX_CONFIG_BYTES} bytes for a config.")
    try:
        config = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path}: is not a JSON object.")
    return config


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"keys appear twice: {', '.join(twice)}")
    return mapping
