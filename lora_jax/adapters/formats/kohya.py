"""kohya's `lora_down`, `lora_up` and `alpha` -> PEFT's words, for text models.

Each module has its own alpha, a scalar tensor; without one the factor is 1. Modules are
named by dotted paths, or by paths whose dots became underscores.

Source: kohya-ss/sd-scripts `networks/lora.py`; diffusers `lora_conversion_utils`.
"""

import re

from lora_jax.adapters.formats.converted import (
    Config,
    Converted,
    Format,
    Tensors,
    base_name,
)
from lora_jax.adapters.scales import scale_fields

FLAT = re.compile(
    r"lora_(?:te\d?|llm)_(?P<head>(?:\w+?_)?)layers_(?P<layer>\d+)_"
    r"(?P<block>self_attn|mlp|attn|attention)_(?P<name>\w+)"
)
ROLES = {"lora_down.weight": ".lora_A.weight", "lora_up.weight": ".lora_B.weight"}
PREFIXES = ("transformer.", "text_encoder.", "text_encoder_2.")
"""What diffusers puts before a dotted path, by the part of its pipeline."""


def detects(tensors: Tensors, config: Config) -> bool:
    """Whether any name ends in `.lora_down.weight`."""
    return any(name.endswith(".lora_down.weight") for name in tensors)


def converts(tensors: Tensors, config: Config, base: Config) -> Converted:
    """Renames every pair, and turns each alpha into a scale."""
    found, origins, read, faults = {}, {}, {}, []
    facts, alphas = {}, {}
    for name, array in tensors.items():
        head, _, tail = name.partition(".lora_")
        if name.endswith(".alpha"):
            module = _module(name.removesuffix(".alpha"))
            if array.size == 1:
                alphas[module] = float(array.reshape(())[()])
                read[name] = f"alpha of {module}"
            else:
                faults.append(f"{name}: has shape {array.shape}, expected one number")
        elif f"lora_{tail}" in ROLES:
            module = _module(head)
            new = module + ROLES[f"lora_{tail}"]
            found[new], origins[new] = array, name
            if tail == "down.weight" and array.ndim == 2:
                facts[module] = array.shape[0]
        else:
            found[name], origins[name] = array, name
    lost = sorted(alphas.keys() - facts.keys())
    faults += [f"{module}: has an alpha and no lora_down" for module in lost]
    bad = sorted(m for m, alpha in alphas.items() if not abs(alpha) < 1e30)
    faults += [f"{module}: alpha is no finite number" for module in bad]
    scales = {m: (r, alphas.get(m, float(r)) / r) for m, r in facts.items() if r}
    fields = {
        **(scale_fields(scales) if not faults else {"lora_alpha": 1}),
        "peft_type": "LORA",
        "base_model_name_or_path": base_name(config),
    }
    return Converted(found, fields, origins, read, tuple(faults))


def _module(name: str) -> str:
    """The dotted path of a module, whichever way it is written."""
    for prefix in PREFIXES:
        if name.startswith(f"{prefix}text_model.") or name.startswith(
            f"{prefix}model."
        ):
            return name.removeprefix(prefix)
    flat = FLAT.fullmatch(name)
    if flat is None:
        return name
    head = flat["head"].removesuffix("_")
    outer = {"text_model_encoder": "text_model.encoder"}.get(head, head)
    path = f"layers.{flat['layer']}.{flat['block']}.{flat['name']}"
    return f"{outer}.{path}" if outer else path


FORMAT = Format("kohya", detects, converts)
