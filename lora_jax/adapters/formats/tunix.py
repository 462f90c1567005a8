"""tunix's and qwix's LoRA leaves (JAX) -> PEFT's words.

`w_lora_a` is (d_in, rank) and `w_lora_b` (rank, heads, head_dim): transposed to PEFT's,
and in attention with the axis of heads apart. A path may be joined by dots or slashes.

Source: google/tunix `models/*/model.py`; google/qwix `_src/providers/lora.py`.
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

NAME = re.compile(
    r"(?:model\.)?layers\.(?P<layer>\d+)\.(?P<block>attn|self_attn|mlp)\."
    r"(?P<name>\w+_proj)\.(?:w|kernel)_lora_(?P<role>a|b)(?:\.value)?"
)
BLOCKS = {"attn": "self_attn", "self_attn": "self_attn", "mlp": "mlp"}


def detects(tensors: Tensors, config: Config) -> bool:
    """Whether any name ends in `w_lora_a` or `kernel_lora_a`."""
    return any(
        re.search(r"(?:w|kernel)_lora_a(?:[./]value)?$", name) for name in tensors
    )


def converts(tensors: Tensors, config: Config, base: Config) -> Converted:
    """Joins the axes of heads, transposes, and renames."""
    found, origins, faults = {}, {}, []
    for name, array in tensors.items():
        parsed = NAME.fullmatch(name.replace("/", "."))
        if parsed is None or array.ndim not in (2, 3) or 0 in array.shape:
            found[name], origins[name] = array, name
            if parsed is not None:
                faults.append(f"{name}: has shape {array.shape}, expected 2 or 3 axes")
            continue
        module = f"model.layers.{parsed['layer']}.{BLOCKS[parsed['block']]}"
        is_a = parsed["role"] == "a"
        new = f"{module}.{parsed['name']}.lora_{'A' if is_a else 'B'}.weight"
        flat = _join_heads(array, is_a=is_a)
        found[new], origins[new] = flat.T, name
    rank, alpha = (config.get(k, config.get(j)) for k, j in _FIELDS)
    fields = {
        "r": rank,
        "lora_alpha": alpha,
        "peft_type": "LORA",
        "base_model_name_or_path": base_name(config),
    }
    return Converted(found, fields, origins, faults=tuple(faults))


_FIELDS = (("r", "rank"), ("lora_alpha", "alpha"))
"""PEFT's field and qwix's."""


def _join_heads(array: np.ndarray, *, is_a: bool) -> np.ndarray:
    """`(d_in, rank)` or `(rank, d_out)`: all axes but the rank's are joined."""
    if is_a:
        return array.reshape(-1, array.shape[-1])
    return array.reshape(array.shape[0], -1)


FORMAT = Format("tunix", detects, converts)
