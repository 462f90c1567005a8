"""A Hugging Face model folder -> its config and tensors, each read when asked for.

Checks each file's header as `safetensors_file` does. Knows nothing of adapters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lora_jax.adapters.folder import read_json
from lora_jax.adapters.safetensors_file import (
    Entry,
    open_regular,
    read_entry,
    read_header,
)
from lora_jax.errors import ModelError

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class BaseFolder:
    """A model's folder.

    Attributes:
      path: the folder.
      config: its `config.json`.
      files: file -> the tensors in it, by name.
    """

    path: Path
    config: Mapping[str, object]
    files: Mapping[Path, Mapping[str, Entry]]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        entries = (entry for file in self.files.values() for entry in file.items())
        return {name: entry.shape for name, entry in entries}

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding: declared so, and none stored."""
        text = self.config.get("text_config")
        inner = text if isinstance(text, dict) else {}
        tied = self.config.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
        return bool(tied) and not any(n.endswith("lm_head.weight") for n in self.shapes)

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor.

        Raises:
          ModelError: if the folder has no such tensor.
        """
        for path, entries in self.files.items():
            if name in entries:
                with open_regular(path) as file:
                    return read_entry(file, path, entries[name])
        raise ModelError(f"{self.path}: has no tensor {name!r}.")


def open_base(path: Path) -> BaseFolder:
    """Opens a model's folder: the headers of its safetensors files, no values.

    Raises:
      ModelError: if it holds no model in safetensors, one tensor twice, or a quantised
        model.
      AdapterError: if a file is broken.
    """
    if not (path / CONFIG_NAME).is_file():
        raise ModelError(f"{path}: holds no {CONFIG_NAME}; give a Hugging Face folder.")
    files = {}
    for file in sorted(path.glob("*.safetensors")):
        with open_regular(file) as opened:
            files[file] = read_header(opened, file)
    names = [name for entries in files.values() for name in entries]
    if not names:
        raise ModelError(f"{path}: holds no *.safetensors; convert the model to it.")
    if len(set(names)) != len(names):
        raise ModelError(f"{path}: its files hold one tensor twice; remove old files.")
    config = read_json(path / CONFIG_NAME)
    if config.get("quantization_config"):
        raise ModelError(f"{path}: is quantised; give the model that was quantised.")
    return BaseFolder(path, config, files)
