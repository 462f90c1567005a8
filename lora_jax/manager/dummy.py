"""Adapters of zeros, to compile and measure with before there are real ones."""

from collections.abc import Collection

from lora_jax.adapters import (
    Adapter,
    AdapterPart,
    EmbeddingLowRank,
    Report,
)
from lora_jax.adapters.content import hash_content
from lora_jax.layers import Sites
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
        if target in places:
            continue
        part = sites[target.site].zeros(target.part, rank)
        is_table = isinstance(part, EmbeddingLowRank)
        if part and (not is_table or name.rpartition(".")[2] in embeddings):
            places.add(target)
            parts[name] = part
    return Adapter(
        name=f"dummy-{id}",
        id=id,
        parts=parts,
        content_hash=hash_content(parts, ()),
        report=Report((), (), 0),
    )
