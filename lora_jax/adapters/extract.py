"""A base model and a fine-tuned one -> the best LoRA adapter of the difference.

Linear layers, embeddings and heads get the nearest low-rank update; norms and other
vectors are kept whole, so nothing that changed is left out.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lora_jax.adapters.adapter import Adapter
from lora_jax.adapters.base_folder import BaseFolder, open_base
from lora_jax.adapters.build import Source, build_adapter
from lora_jax.adapters.factor import factor_matrix
from lora_jax.adapters.scales import scale_fields
from lora_jax.errors import AdapterError, faults

HEAD = "lm_head"


@dataclass
class _Found:
    """What has been extracted so far; used by one call of `extract_adapter` only."""

    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    ranks: dict[str, tuple[int, float]] = field(default_factory=dict)
    whole: list[str] = field(default_factory=list)
    biases: dict[str, np.ndarray] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def extract_adapter(
    base: str | os.PathLike[str],
    tuned: str | os.PathLike[str],
    rank: int,
    *,
    name: str,
    adapter_id: int | None = None,
) -> Adapter:
    """Returns the adapter of this rank that comes nearest to a fine-tuned model.

    Args:
      base: Hugging Face folder of the base model, safetensors.
      tuned: folder of the fine-tuned model; same architecture, the vocabulary may have
        grown.
      rank: rank of every update at most.
      name: name of the result.
      adapter_id: id of the result, None for the next free one.

    Returns:
      A float32 adapter of scale 1; the report's notes say what each module keeps of its
      change. Vectors, and matrices whose shape changed, are kept whole.

    Raises:
      AdapterError: if the models have other tensors, or do not differ.
      ModelError: if a folder cannot be read.
    """
    if rank < 1:
        raise AdapterError(f"rank {rank} is not at least 1.")
    old, new = open_base(Path(base).expanduser()), open_base(Path(tuned).expanduser())
    _check_names(old, new)
    found = _Found()
    for tensor in sorted(new.shapes):
        _compare(found, old, new, tensor, rank)
    _add_biases(found)
    if not found.tensors:
        raise AdapterError(f"{new.path}: does not differ from {old.path}.")
    fields = {
        **scale_fields(found.ranks),
        "base_model_name_or_path": str(old.path),
        "modules_to_save": found.whole or None,
        "bias": "all" if found.biases else "none",
    }
    source = Source(
        found.tensors, fields, f"{new.path} less {old.path}", notes=tuple(found.notes)
    )
    return build_adapter(source, name=name, adapter_id=adapter_id)


def _check_names(old: BaseFolder, new: BaseFolder) -> None:
    # An untied head is compared with the embedding that it was tied to.
    virtual = {f"{HEAD}.weight"} if old.is_tied else set()
    missing = sorted(old.shapes.keys() - new.shapes.keys())
    extra = sorted(new.shapes.keys() - old.shapes.keys() - virtual)
    if missing or extra:
        found = [f"{name}: is missing in {new.path}" for name in missing[:10]]
        found += [f"{name}: is missing in {old.path}" for name in extra[:10]]
        headline = f"{new.path} is no fine-tuned {old.path}:"
        raise AdapterError(faults(headline, found))


def _compare(
    found: _Found, old: BaseFolder, new: BaseFolder, tensor: str, rank: int
) -> None:
    module, _, kind = tensor.rpartition(".")
    source = tensor if tensor in old.shapes else _embedding(old)
    before = old.read(source).astype(np.float32)
    after = new.read(tensor).astype(np.float32)
    if before.shape == after.shape and np.array_equal(before, after):
        return
    if kind == "bias":
        found.biases[module] = after
    elif before.shape != after.shape or after.ndim != 2:
        found.tensors[tensor] = after
        found.whole.append(module)
    else:
        _add_update(found, module, after - before, rank)
        if new.is_tied and module.endswith("embed_tokens"):
            _add_tied_head(found, module)


def _embedding(base: BaseFolder) -> str:
    return next(n for n in base.shapes if n.endswith("embed_tokens.weight"))


def _add_update(found: _Found, module: str, change: np.ndarray, rank: int) -> None:
    embedding = module.endswith("embed_tokens")
    (a, b), share = factor_matrix(change.T if embedding else change, rank)
    first, second = (
        (".lora_embedding_A", ".lora_embedding_B")
        if embedding
        else (".lora_A.weight", ".lora_B.weight")
    )
    found.tensors |= {module + first: a, module + second: b}
    found.ranks[module] = (len(a), 1.0)
    found.notes.append(f"{module}: rank {len(a)} keeps {share:.2%} of the change")


def _add_tied_head(found: _Found, embed: str) -> None:
    """A tied head changed too; an adapter of the embedding alone would leave it."""
    a = found.tensors[f"{embed}.lora_embedding_A"]
    b = found.tensors[f"{embed}.lora_embedding_B"]
    found.tensors[f"{HEAD}.lora_A.weight"] = np.ascontiguousarray(b.T)
    found.tensors[f"{HEAD}.lora_B.weight"] = np.ascontiguousarray(a.T)
    found.ranks[HEAD] = found.ranks[embed]


def _add_biases(found: _Found) -> None:
    for module, bias in found.biases.items():
        whole = module in found.whole
        paired = f"{module}.lora_A.weight" in found.tensors
        suffix = ".base_layer.bias" if paired and not whole else ".bias"
        found.tensors[module + suffix] = bias
