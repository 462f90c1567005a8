"""Checks an adapter's copies of base layers against the base that will serve it.

PEFT writes the base weight of an adapted embedding or head beside its pair. If the
served base has other values there, the adapter was trained on another model.
"""

import jax
from flax import nnx

from lora_jax.adapters import Adapter, match_modules
from lora_jax.layers import LoRALayer, Sites


def base_copy_faults(adapter: Adapter, sites: Sites) -> list[str]:
    """Returns one text for each base layer that differs from the file's copy of it."""
    matched, _ = match_modules(adapter.base_copies, sites.targets)
    found = []
    for module, name in matched.items():
        weight = _weight(sites[sites.targets[name].site], sites)
        copy = adapter.base_copies[module]
        difference = None if weight is None else copy.difference(weight)
        if difference is not None:
            found.append(
                f"{module}: {difference}; it was trained on another base model."
            )
    return found


def _weight(layer: LoRALayer, sites: Sites) -> jax.Array | None:
    """A layer's weight as a checkpoint stores it, None where it cannot be told."""
    if layer.lora_site.name == sites.tied_head:
        embeddings = [e for e in sites.values() if e.lora_site.kind == "embed"]
        return _weight(embeddings[0], sites) if embeddings else None
    kinds = vars(layer)
    if "embedding" in kinds:
        return kinds["embedding"][...]
    kernel = kinds.get("kernel")
    if not isinstance(kernel, nnx.Param) or len(kernel.shape) != 2:
        return None
    return kernel[...].T
