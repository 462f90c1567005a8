"""A part and the base layer's weights -> the merged weights; one function a kind.

Sums are made in the dtype of the layer that is given (float32 or wider); rounding is
the caller's. These few lines also say what each kind means.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lora_jax.adapters.parts import (
    AdapterPart,
    DoRA,
    EmbeddingLowRank,
    FullModule,
    LoRABias,
    LowRank,
    ReplacedBias,
    TokenRows,
)
from lora_jax.errors import AdapterError


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's weights as the checkpoint stores them.

    Attributes:
      weight: `(d_out, d_in)`, `(vocab, dim)` for embeddings and heads.
      bias: `(d_out,)`, or None for a layer without.
    """

    weight: np.ndarray
    bias: np.ndarray | None


def merge_part(part: AdapterPart, layer: Layer) -> Layer:
    """Returns the layer with the part in its weights.

    Raises:
      AdapterError: if the kind cannot be merged, or does not fit the layer.
    """
    merger = MERGERS.get(type(part))
    if merger is None:
        raise AdapterError(f"a part of kind {part.kind!r} cannot be merged")
    return merger(part, layer)


def _low_rank(part: LowRank, layer: Layer) -> Layer:
    return replace(layer, weight=layer.weight + _product(part, layer.weight))


def _embedding(part: EmbeddingLowRank, layer: Layer) -> Layer:
    return replace(layer, weight=layer.weight + _product(part, layer.weight.T).T)


def _product(part: LowRank | EmbeddingLowRank, weight: np.ndarray) -> np.ndarray:
    shape = (part.b.shape[0], part.a.shape[1])
    if shape != weight.shape:
        raise AdapterError(f"update of shape {shape}, the layer has {weight.shape}")
    dtype = weight.dtype
    return (part.b.astype(dtype) @ part.a.astype(dtype)) * dtype.type(part.scale)


def _lora_bias(part: LoRABias, layer: Layer) -> Layer:
    bias = part.bias.astype(layer.weight.dtype) * layer.weight.dtype.type(
        part.update.scale
    )
    whole = _own_bias(layer, part.bias) + bias
    return replace(_low_rank(part.update, layer), bias=whole)


def _dora(part: DoRA, layer: Layer) -> Layer:
    of_embedding = isinstance(part.update, EmbeddingLowRank)
    summed = merge_part(part.update, layer).weight
    by_row = summed.T if of_embedding else summed
    lengths = np.linalg.norm(by_row, axis=1, keepdims=True)
    scaled = by_row * (part.magnitude.astype(by_row.dtype)[:, None] / lengths)
    return replace(layer, weight=scaled.T if of_embedding else scaled)


def _replaced_bias(part: ReplacedBias, layer: Layer) -> Layer:
    _own_bias(layer, part.bias)
    changed = replace(layer, bias=part.bias.astype(layer.weight.dtype))
    return changed if part.update is None else merge_part(part.update, changed)


def _own_bias(layer: Layer, wanted: np.ndarray) -> np.ndarray:
    if layer.bias is None or layer.bias.shape != wanted.shape:
        found = "no bias" if layer.bias is None else f"a bias of {layer.bias.shape}"
        raise AdapterError(f"bias of shape {wanted.shape}, the layer has {found}")
    return layer.bias


def _full_module(part: FullModule, layer: Layer) -> Layer:
    weight = part.weight.astype(layer.weight.dtype)
    if weight.shape[1:] != layer.weight.shape[1:]:
        text = f"weight of shape {weight.shape}, the layer has {layer.weight.shape}"
        raise AdapterError(text)
    bias = layer.bias if part.bias is None else part.bias.astype(weight.dtype)
    return Layer(weight, bias)


def _token_rows(part: TokenRows, layer: Layer) -> Layer:
    vocab, dim = layer.weight.shape
    if max(part.indices, default=0) >= vocab or part.rows.shape[1] != dim:
        raise AdapterError(
            f"rows {part.rows.shape} for tokens up to {max(part.indices, default=0)}, "
            f"the layer has {layer.weight.shape}"
        )
    weight = layer.weight.copy()
    weight[list(part.indices)] = part.rows
    return replace(layer, weight=weight)


MERGERS: Mapping[type, Callable[..., Layer]] = {
    LowRank: _low_rank,
    LoRABias: _lora_bias,
    EmbeddingLowRank: _embedding,
    DoRA: _dora,
    ReplacedBias: _replaced_bias,
    FullModule: _full_module,
    TokenRows: _token_rows,
}
"""Kind -> how it is merged."""
