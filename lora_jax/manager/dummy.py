"""Adapters of zeros, to compile and measure with before there are real ones."""

from collections.abc import Collection

import numpy as np

from lora_jax.adapters import (
    Adapter,
    AdapterPart,
    EmbeddingLowRank,
    LowRank,
    Report,
)
from lora_jax.adapters.content import hash_content
from lora_jax.layers import LoRALayer, Sites
from lora_jax.layers.sites import Target


def create_dummy(
    sites: Sites, id: int, rank: int, *, embeddings: Collection[str]
) -> Adapter:
    """Returns an adapter whose every update is zero, on every layer that takes one.

    Its arrays are views of single zeros: they take no memory until they are packed.

    Args:
      sites: the model's LoRA layers.
      id: the adapter's id.
      rank: of every pair.
      embeddings: last names of the embeddings to adapt. The others are left out: an
        embedding's arrays are as long as the vocabulary, and enter the bank only with
        the first adapter that needs them.
    """
    parts: dict[str, AdapterPart] = {}
    places: set[Target] = set()
    for name, target in sites.targets.items():
        one = target.part if isinstance(target.part, int) else None
        part = None if one is None else _zeros(sites[target.site], one, rank)
        wanted = isinstance(part, LowRank) or name.rpartition(".")[2] in embeddings
        if part is not None and wanted and target not in places:
            places.add(target)
            parts[name] = part
    return Adapter(
        name=f"dummy-{id}",
        id=id,
        parts=parts,
        content_hash=hash_content(parts, ()),
        report=Report((), (), 0),
    )


def _zeros(layer: LoRALayer, part: int, rank: int) -> AdapterPart | None:
    """Zeros of the kind that the layer takes; None if it takes no pair at all."""
    site = layer.lora_site
    a, b = _view(rank, site.d_in), _view(site.part_widths[part], rank)
    kinds = (LowRank(a, b, 1.0), EmbeddingLowRank(a, b, 1.0))
    return next((kind for kind in kinds if not layer.faults(part, kind)), None)


def _view(*shape: int) -> np.ndarray:
    return np.broadcast_to(np.float32(0), shape)
