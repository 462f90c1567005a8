"""Merged layers and the base's folder -> the merged model's folder, file by file."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from lora_jax.adapters.base_folder import CONFIG_NAME, INDEX_NAME, BaseFolder
from lora_jax.adapters.delta import Layer

DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Merged:
    """A merged model, ready to be written.

    Attributes:
      base: the base model's folder.
      layers: module path -> its merged and rounded weights.
      tensors: name -> values, for those that are not a layer's weight or bias.
      embed: path of the embedding, "" where there is none.
      head: path of the head.
      untied: whether the head is stored where the base stores none.
      dtype: dtype of all tensors, None to keep each one's.
    """

    base: BaseFolder
    layers: Mapping[str, Layer]
    tensors: Mapping[str, np.ndarray]
    embed: str
    head: str
    untied: bool
    dtype: str | None


def write_merged(merged: Merged, target: Path) -> None:
    """Writes weights, index, config, and copies of all other small files."""
    target.mkdir(parents=True, exist_ok=True)
    _copy_others(merged.base.path, target)
    _write_tensors(merged, target)
    _write_config(merged, target)


def _copy_others(source: Path, target: Path) -> None:
    """Copies tokenizer and other small files; weights and config are written anew."""
    for file in source.iterdir():
        weights = file.suffix in (".safetensors", ".bin", ".pt", ".gguf")
        if (
            file.is_file()
            and not weights
            and file.name not in (CONFIG_NAME, INDEX_NAME)
        ):
            shutil.copyfile(file, target / file.name)


def _write_tensors(merged: Merged, target: Path) -> None:
    index: dict[str, str] = {}
    total = 0
    for file, entries in merged.base.files.items():
        tensors = {name: _tensor(merged, name) for name in entries}
        if merged.untied and f"{merged.embed}.weight" in entries:
            head = f"{merged.head}.weight"
            tensors[head] = _tensor(merged, head)
        save_file(tensors, target / file.name, {"format": "pt"})
        index |= dict.fromkeys(tensors, file.name)
        total += sum(array.nbytes for array in tensors.values())
    if len(merged.base.files) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (target / INDEX_NAME).write_text(json.dumps(content, indent=2) + "\n")


def _tensor(merged: Merged, name: str) -> np.ndarray:
    module, _, kind = name.rpartition(".")
    layer = merged.layers.get(module)
    own = {"weight": layer.weight, "bias": layer.bias} if layer is not None else {}
    array = merged.tensors.get(name, own.get(kind))
    if array is None:
        array = merged.base.read(name)
        if merged.dtype and array.dtype in (*DTYPES.values(), np.dtype(np.float64)):
            array = array.astype(DTYPES[merged.dtype])
    return np.ascontiguousarray(array)


def _write_config(merged: Merged, target: Path) -> None:
    config = dict(merged.base.config)
    text = config.get("text_config")
    if merged.untied:
        config["tie_word_embeddings"] = False
        if isinstance(text, dict):
            config["text_config"] = text | {"tie_word_embeddings": False}
    embed = merged.layers.get(merged.embed)
    if embed is not None and "vocab_size" in config:
        config["vocab_size"] = embed.weight.shape[0]
    for key in ("dtype", "torch_dtype"):
        if merged.dtype and key in config:
            config[key] = merged.dtype
    (target / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
