"""Several adapters with weights -> one adapter, exactly or at a smaller rank."""

from collections.abc import Mapping, Sequence

import numpy as np

from lora_jax.adapters.adapter import Adapter
from lora_jax.adapters.build import Source, build_adapter
from lora_jax.adapters.factor import Factors, factor_product
from lora_jax.adapters.parts import EmbeddingLowRank, LowRank
from lora_jax.adapters.scales import scale_fields
from lora_jax.errors import AdapterError, faults

NAMES: Mapping[type, tuple[str, str]] = {
    LowRank: (".lora_A.weight", ".lora_B.weight"),
    EmbeddingLowRank: (".lora_embedding_A", ".lora_embedding_B"),
}
"""Kinds whose sum is of the same kind -> names of the factors."""

Pair = LowRank | EmbeddingLowRank


def combine_adapters(
    adapters: Sequence[Adapter],
    weights: Sequence[float],
    *,
    name: str,
    rank: int | None = None,
    adapter_id: int | None = None,
) -> Adapter:
    """Returns the adapter whose update is the weighted sum of the adapters' updates.

    Args:
      adapters: of plain low-rank kinds, by the same spelling of module paths.
      weights: factor of each adapter.
      name: name of the result.
      rank: rank of the result at most, the nearest in the least-squares sense; None for
        the exact sum, whose rank is the sum of the ranks.
      adapter_id: id of the result, None for the next free one.

    Returns:
      A float32 adapter of scale 1. With one adapter and a rank this reduces its rank;
      the report's notes say what each module keeps.

    Raises:
      AdapterError: naming every part that has no sum (DoRA, biases, whole modules).
    """
    found = _faults(adapters, weights, rank)
    if found:
        headline = f"adapters {', '.join(a.name for a in adapters)} cannot be combined:"
        raise AdapterError(faults(headline, found))
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, tuple[int, float]] = {}
    notes = []
    weighted = list(zip(weights, map(_pairs, adapters), strict=True))
    for module in sorted({module for _, pairs in weighted for module in pairs}):
        items = [(w, pairs[module]) for w, pairs in weighted if module in pairs]
        a, b = _stack(items)
        if rank is not None and rank < len(a):
            (a, b), share = factor_product(a, b, rank)
            notes.append(f"{module}: rank {len(a)} keeps {share:.2%} of the update")
        first, second = NAMES[type(items[0][1])]
        tensors |= {module + first: a, module + second: b}
        ranks[module] = (len(a), 1.0)
    base = adapters[0].base_model
    fields = {**scale_fields(ranks), "base_model_name_or_path": base}
    source = Source(tensors, fields, "a combination", notes=tuple(notes))
    return build_adapter(source, name=name, adapter_id=adapter_id)


def _stack(items: Sequence[tuple[float, Pair]]) -> Factors:
    """The factors side by side, so that their product is the sum; scales are in b."""
    a = np.concatenate([part.a.astype(np.float32) for _, part in items])
    b = [
        part.b.astype(np.float32) * np.float32(weight * part.scale)
        for weight, part in items
    ]
    return a, np.concatenate(b, axis=1)


def _adapter_faults(adapter: Adapter) -> list[str]:
    found = []
    if adapter.invocation_tokens:
        found.append(f"{adapter.name}: waits for its invocation tokens")
    if adapter.is_partial:
        found.append(f"{adapter.name}: experts of it were not read; load it whole")
    return found


def _faults(
    adapters: Sequence[Adapter], weights: Sequence[float], rank: int | None
) -> list[str]:
    found = []
    if not adapters or len(adapters) != len(weights):
        found.append(f"{len(weights)} weights for {len(adapters)} adapters")
    if not np.isfinite(weights).all():
        found.append(f"weights {list(weights)} are not finite")
    if rank is not None and rank < 1:
        found.append(f"rank {rank} is not at least 1")
    shapes: dict[str, tuple[object, ...]] = {}
    for adapter in adapters:
        found += _adapter_faults(adapter)
        found += [
            f"{adapter.name}: {module}: a {part.kind} has no sum"
            for module, part in adapter.parts.items()
            if not isinstance(part, Pair)
        ]
        for module, part in _pairs(adapter).items():
            shape = (part.kind, part.b.shape[0], part.a.shape[1])
            if shapes.setdefault(module, shape) != shape:
                found.append(f"{adapter.name}: {module}: differs in kind or shape")
    return found


def _pairs(adapter: Adapter) -> dict[str, Pair]:
    return {m: part for m, part in adapter.parts.items() if isinstance(part, Pair)}
