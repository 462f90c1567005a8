"""Writes adapter folders for tests: tensors by PEFT's names, and a config."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

WIDTH, INNER = 32, 64
"""Square projections (a transposed pair would fit them) and a wider one."""

Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.1.self_attn.v_proj"
UP = "model.layers.0.mlp.up_proj"
PREFIX = "base_model.model."


def pair(
    module: str, rank: int, *, seed: int = 0, prefix: str = PREFIX
) -> dict[str, np.ndarray]:
    """Returns `lora_A` and `lora_B` of one module, entries N(0, 0.3)."""
    rng = np.random.default_rng(seed)
    d_out = INNER if module.endswith("up_proj") else WIDTH
    return {
        f"{prefix}{module}.lora_A.weight": normal(rng, rank, WIDTH),
        f"{prefix}{module}.lora_B.weight": normal(rng, d_out, rank),
    }


def pairs(modules: Sequence[str] = (Q, V, UP), rank: int = 4) -> dict[str, np.ndarray]:
    """Returns the pairs of several modules, all different."""
    return {
        name: array
        for seed, module in enumerate(modules)
        for name, array in pair(module, rank, seed=seed).items()
    }


def config(**fields: object) -> dict[str, object]:
    """Returns a minimal config, rank 4 and alpha 8, with these fields besides."""
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | fields


def write(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    fields: Mapping[str, object] | None = None,
) -> Path:
    """Writes config and weights into the folder, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = config() if fields is None else dict(fields)
    (folder / "adapter_config.json").write_text(json.dumps(shown))
    save_file(dict(tensors), folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns float32 values of N(0, 0.3)."""
    return rng.normal(0.0, 0.3, shape).astype(np.float32)
