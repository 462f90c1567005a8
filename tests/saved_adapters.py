"""Adapters of the toy model as PEFT folders."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lora_jax.adapters import Adapter


def save_adapter(folder: Path, adapter: Adapter) -> None:
    """Writes an adapter of the toy model as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for module, pair in adapter.parts.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = np.array(pair.a)
        tensors[f"base_model.model.{module}.lora_B.weight"] = np.array(pair.b)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = dict(adapter.config) | {"base_model_name_or_path": None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
