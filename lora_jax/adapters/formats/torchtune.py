"""torchtune's native adapter state dict -> PEFT's words.

Names differ by a table. Rows of q and k are in the order of Meta's rotary layout, two
by two, and PEFT's in that of Hugging Face, half by half; turning them needs the number
of heads, which only the base model's config knows.

Source: torchtune, `torchtune/models/convert_weights.py`.
"""

import re

import numpy as np

from lora_jax.adapters.formats.converted import (
    Config,
    Converted,
    Format,
    Tensors,
    base_name,
)

MODULES = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
}
ROLES = {
    "lora_a.weight": ".lora_A.weight",
    "lora_b.weight": ".lora_B.weight",
    "magnitude": ".lora_magnitude_vector",
}
NAME = re.compile(
    r"(?:layers\.(?P<layer>\d+)\.(?P<module>[a-z]+\.\w+)|(?P<output>output))\."
    r"(?P<role>lora_a\.weight|lora_b\.weight|magnitude)"
)
HEADS = {"attn.q_proj": "num_attention_heads", "attn.k_proj": "num_key_value_heads"}
HALF_SPLIT = ("qwen2", "qwen3")
"""Models whose rotary layout is Hugging Face's in torchtune too."""


def detects(tensors: Tensors, config: Config) -> bool:
    """Whether any name ends in `.lora_a.weight`."""
    return any(name.endswith(".lora_a.weight") for name in tensors)


def converts(tensors: Tensors, config: Config, base: Config) -> Converted:
    """Renames every tensor, and reorders the rows of q and k."""
    found, origins, faults = {}, {}, []
    for name, array in tensors.items():
        parsed = NAME.fullmatch(name)
        inner = parsed["module"] if parsed else None
        if parsed is None or (inner is not None and inner not in MODULES):
            found[name], origins[name] = array, name
            continue
        module = (
            f"model.layers.{parsed['layer']}.{MODULES[inner]}" if inner else "lm_head"
        )
        new = module + ROLES[parsed["role"]]
        if inner in HEADS and parsed["role"] != "lora_a.weight":
            array, fault = _reorder(name, array, base, HEADS[inner])
            faults += fault
        found[new], origins[new] = array, name
    fields = {
        **{key: config[key] for key in ("r", "lora_alpha") if key in config},
        "peft_type": "LORA",
        "base_model_name_or_path": base_name(config),
        "use_dora": any(name.endswith("lora_magnitude_vector") for name in found),
    }
    return Converted(found, fields, origins, faults=tuple(faults))


def _reorder(
    name: str, array: np.ndarray, base: Config, field: str
) -> tuple[np.ndarray, list[str]]:
    if base.get("model_type") in HALF_SPLIT:
        return array, []
    heads = base.get(field, base.get("num_attention_heads"))
    if type(heads) is not int or heads < 1:
        text = (
            f"{name}: its rows must be reordered by head, and the base model's config "
            "is not known; pass base_config, or export with torchtune's PEFT exporter"
        )
        return array, [text]
    rows = array.shape[0] if array.ndim else 0
    if not rows or rows % (2 * heads):
        return array, [f"{name}: {rows} rows are not {heads} heads of even width"]
    rest = array.shape[1:]
    pairs = array.reshape(heads, rows // heads // 2, 2, *rest)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape), []


FORMAT = Format("torchtune", detects, converts)
