"""MLX-LM's `adapters.safetensors` -> PEFT's words.

`lora_a` is (d_in, rank) and `lora_b` (rank, d_out), so both are turned; an embedding's
are (vocab, rank) and (rank, dim). The factor on the product is `scale` itself, which is
not divided by the rank.

Source: mlx-lm, `mlx_lm/tuner/lora.py` and `dora.py`.
"""

from lora_jax.adapters.formats.converted import (
    Config,
    Converted,
    Format,
    Tensors,
    base_name,
)
from lora_jax.adapters.scales import scale_fields

DEFAULT_SCALE = 20.0
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings")


def detects(tensors: Tensors, config: Config) -> bool:
    """Whether names end in `.lora_a`, or the config is MLX-LM's."""
    if config.get("peft_type"):
        return False
    return any(name.endswith(".lora_a") for name in tensors) or (
        "fine_tune_type" in config or "lora_parameters" in config
    )


def converts(tensors: Tensors, config: Config, base: Config) -> Converted:
    """Turns every pair, and the factor into alpha."""
    found, origins, faults = {}, {}, _config_faults(config)
    scale, text = _scale(config)
    faults += text
    facts = {}
    for name, array in tensors.items():
        module, _, last = name.rpartition(".")
        suffix = _suffix(module, last)
        if suffix is None or (last == "m" and _is_embedding(module)):
            new = name
            if suffix is not None:
                faults.append(f"{name}: MLX's DoRA of an embedding is not PEFT's")
        else:
            new = module + suffix
        found[new] = array.T if last in ("lora_a", "lora_b") else array
        origins[new] = name
        if last == "lora_a" and array.ndim == 2:
            facts[module] = (array.shape[1], scale)
    fields = {
        **scale_fields(facts),
        "peft_type": "LORA",
        "base_model_name_or_path": base_name(config),
        "use_dora": any(name.endswith("lora_magnitude_vector") for name in found),
    }
    return Converted(found, fields, origins, faults=tuple(faults))


def _suffix(module: str, last: str) -> str | None:
    embedding = _is_embedding(module)
    return {
        "lora_a": ".lora_embedding_A" if embedding else ".lora_A.weight",
        "lora_b": ".lora_embedding_B" if embedding else ".lora_B.weight",
        "m": ".lora_magnitude_vector",
    }.get(last)


def _is_embedding(module: str) -> bool:
    return module.rpartition(".")[2] in EMBEDDINGS


def _config_faults(config: Config) -> list[str]:
    kind = config.get("fine_tune_type", "lora")
    if kind in ("lora", "dora"):
        return []
    return [f"config: fine_tune_type={kind!r}: only lora and dora are adapters"]


def _scale(config: Config) -> tuple[float, list[str]]:
    parameters = config.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    if scale is None:
        return DEFAULT_SCALE, []
    if isinstance(scale, int | float) and abs(scale) < 1e30:
        return float(scale), []
    return DEFAULT_SCALE, [f"config: lora_parameters.scale={scale!r}: must be a number"]


FORMAT = Format("MLX-LM", detects, converts)
