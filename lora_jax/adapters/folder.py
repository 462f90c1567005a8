"""A path -> the adapter's config and tensors as they lie on disk.

Knows file names and their limits; knows nothing of what config or tensors mean.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lora_jax.adapters.safetensors_file import open_regular, read_safetensors
from lora_jax.errors import AdapterError, AdapterNotFoundError

CONFIG_NAME = "adapter_config.json"

MAX_CONFIG_BYTES = 4 * 2**20
"""A config that lists 10 000 modules by full path has about 1 MB."""

READERS: Mapping[str, Callable[[Path], dict[str, np.ndarray]]] = {
    "adapter_model.safetensors": read_safetensors,
}
"""Weights files in order of precedence -> what reads them."""


@dataclass(frozen=True)
class Folder:
    """An adapter's folder, read.

    Attributes:
      path: the folder.
      config: the parsed config.
      tensors: name -> read-only values.
    """

    path: Path
    config: Mapping[str, object]
    tensors: Mapping[str, np.ndarray]


def read_folder(path: Path) -> Folder:
    """Reads an adapter's folder.

    Raises:
      AdapterNotFoundError: if there is no such folder, or no config in it.
      AdapterError: if config or weights are missing, broken, or too large.
    """
    if not path.is_dir():
        raise AdapterNotFoundError(
            f"adapter {path.name!r}: there is no folder {path}; give the folder that "
            f"holds {CONFIG_NAME}."
        )
    if not (path / CONFIG_NAME).exists():
        raise AdapterNotFoundError(
            f"adapter {path.name!r}: {path} holds no {CONFIG_NAME}; give the folder "
            "that PEFT's save_pretrained wrote."
        )
    config = read_json(path / CONFIG_NAME)
    for name, reader in READERS.items():
        if (path / name).exists():
            return Folder(path, config, reader(path / name))
    raise AdapterError(
        f"adapter {path.name!r}: {path} doesn't contain tensors; expected "
        f"{' or '.join(READERS)}."
    )


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
