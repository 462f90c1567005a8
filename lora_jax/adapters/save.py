"""Adapter -> a PEFT folder that `peft` loads to the same model.

Values, dtypes and scales are written as they are, so reading the folder back gives the
same content hash.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lora_jax.adapters.adapter import Adapter
from lora_jax.adapters.build import Source, build_adapter
from lora_jax.adapters.config import read_meaning
from lora_jax.adapters.expert_layout import expert_paths
from lora_jax.adapters.fields import RULES
from lora_jax.adapters.folder import CONFIG_NAME
from lora_jax.adapters.parts import (
    AdapterPart,
    DoRA,
    EmbeddingLowRank,
    ExpertPairs,
    ExpertsLowRank,
    FullModule,
    LoRABias,
    LowRank,
    ReplacedBias,
    TokenRows,
    nested,
    scale_of,
)
from lora_jax.adapters.scales import scale_fields
from lora_jax.errors import AdapterError, faults

PREFIX = "base_model.model."
WEIGHTS_NAME = "adapter_model.safetensors"

Named = Iterator[tuple[str, np.ndarray]]


def save_adapter(adapter: Adapter, folder: str | os.PathLike[str]) -> Path:
    """Writes the adapter as a PEFT folder; files that are there are replaced at once.

    Args:
      adapter: any adapter, whatever format it was read from.
      folder: where `adapter_config.json` and `adapter_model.safetensors` go; made if it
        is not there.

    Returns:
      The folder.

    Raises:
      AdapterError: if PEFT's format cannot say what the adapter says, or experts of it
        were not read, before anything is written.
    """
    if adapter.is_partial:
        raise AdapterError(
            f"adapter {adapter.name!r} holds the experts {adapter.local_experts} "
            "alone; load it without local_experts to write it."
        )
    tensors = to_tensors(adapter)
    config = to_config(adapter)
    _check(adapter, tensors, config)
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path, prefix=".saving-") as scratch:
        draft = Path(scratch)
        save_file(tensors, draft / WEIGHTS_NAME, {"format": "pt"})
        (draft / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
        os.replace(draft / WEIGHTS_NAME, path / WEIGHTS_NAME)
        os.replace(draft / CONFIG_NAME, path / CONFIG_NAME)
    return path


def to_tensors(adapter: Adapter) -> dict[str, np.ndarray]:
    """Returns the adapter's arrays by PEFT's names."""
    return {
        f"{PREFIX}{module}{name}": np.ascontiguousarray(array)
        for module, part in adapter.parts.items()
        for inner in nested(part)
        for name, array in WRITERS[type(inner)](inner)
    }


def to_config(adapter: Adapter) -> dict[str, object]:
    """Returns PEFT's config: what the adapter was read with, and what its parts say."""
    known = {key: value for key, value in adapter.config.items() if key in RULES}
    kinds = adapter.kinds
    return {
        **known,
        **_scales(adapter),
        "peft_type": "LORA",
        "base_model_name_or_path": adapter.base_model or None,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": _modules(adapter, _is_targeted),
        "modules_to_save": _saved(adapter, known) or None,
        "bias": _bias(adapter),
        "lora_bias": "lora_bias" in kinds,
        "use_dora": "dora" in kinds,
        "trainable_token_indices": _token_indices(adapter, known) or None,
        "alora_invocation_tokens": list(adapter.invocation_tokens) or None,
        "target_parameters": _parameters(adapter, known) or None,
    }


def _pair(part: LowRank | ExpertsLowRank | ExpertPairs) -> Named:
    yield ".lora_A.weight", part.a
    yield ".lora_B.weight", part.b


def _embedding(part: EmbeddingLowRank) -> Named:
    yield ".lora_embedding_A", part.a
    yield ".lora_embedding_B", part.b


def _lora_bias(part: LoRABias) -> Named:
    yield ".lora_B.bias", part.bias


def _magnitude(part: DoRA) -> Named:
    yield ".lora_magnitude_vector", part.magnitude


def _replaced_bias(part: ReplacedBias) -> Named:
    yield (".bias" if part.update is None else ".base_layer.bias"), part.bias


def _full_module(part: FullModule) -> Named:
    yield ".weight", part.weight
    if part.bias is not None:
        yield ".bias", part.bias


def _token_rows(part: TokenRows) -> Named:
    yield ".token_adapter.trainable_tokens_delta", part.rows


WRITERS: Mapping[type, Callable[..., Named]] = {
    LowRank: _pair,
    ExpertsLowRank: _pair,
    ExpertPairs: _pair,
    EmbeddingLowRank: _embedding,
    LoRABias: _lora_bias,
    DoRA: _magnitude,
    ReplacedBias: _replaced_bias,
    FullModule: _full_module,
    TokenRows: _token_rows,
}
"""Kind -> the names after the module path and the arrays that the kind itself adds."""


def _innermost(part: AdapterPart) -> AdapterPart:
    *_, last = nested(part)
    return last


def _is_targeted(part: AdapterPart) -> bool:
    return isinstance(_innermost(part), LowRank | EmbeddingLowRank)


def _modules(adapter: Adapter, wanted: Callable[[AdapterPart], bool]) -> list[str]:
    return sorted(module for module, part in adapter.parts.items() if wanted(part))


def _saved(adapter: Adapter, known: Mapping) -> list[str]:
    """The declared modules, and those replaced that no declaration covers."""
    declared = list(known.get("modules_to_save") or ())
    full = _modules(adapter, lambda part: isinstance(part, FullModule))
    meaning, _ = read_meaning({"lora_alpha": 1, "modules_to_save": declared})
    assert meaning is not None
    return declared + [module for module in full if not meaning.saves(module)]


def _bias(adapter: Adapter) -> str:
    biases = [p for p in adapter.parts.values() if isinstance(p, ReplacedBias)]
    if not biases:
        return "none"
    return "all" if any(part.update is None for part in biases) else "lora_only"


def _token_indices(adapter: Adapter, known: Mapping) -> object:
    rows = {m: p for m, p in adapter.parts.items() if isinstance(p, TokenRows)}
    declared = known.get("trainable_token_indices")
    if declared or not rows:
        return declared
    return {module: list(part.indices) for module, part in rows.items()}


def _parameters(adapter: Adapter, known: Mapping) -> object:
    experts = {m: p for m, p in adapter.parts.items() if isinstance(p, ExpertsLowRank)}
    return known.get("target_parameters") or [
        expert_paths(module, part)[0]
        for module, part in sorted(experts.items())
        if part.parameter
    ]


def _scales(adapter: Adapter) -> dict[str, object]:
    """The fields that give each module its rank and scale.

    Those that the adapter was read with, if they still do; else alpha = scale * rank
    with a pattern for each module that is not like most.
    """
    parts = {m: _innermost(p) for m, p in adapter.parts.items() if p.rank}
    meaning, found = read_meaning(adapter.config)
    if meaning is not None and not found:
        return {}
    facts = {m: (p.rank, scale_of(p)) for m, p in parts.items()}
    return scale_fields(facts)


def _check(adapter: Adapter, tensors: Mapping[str, np.ndarray], config: dict) -> None:
    """Reads the draft back; what it does not say again cannot be written."""
    source = Source(tensors, config, "its PEFT form", allow_nonfinite=True)
    again = build_adapter(source, name=adapter.name, adapter_id=adapter.id)
    if again.content_hash != adapter.content_hash:
        different = [
            f"{module}: {part.kind} of rank {part.rank}, scale {scale_of(part)!r}"
            for module, part in adapter.parts.items()
            if module not in again.parts
            or scale_of(again.parts[module]) != scale_of(part)
        ]
        headline = f"adapter {adapter.name!r} cannot be said in PEFT's format:"
        raise AdapterError(faults(headline, different or ["other values"]))
