"""The tensors of one module -> what they do to it. One row in `KINDS` for each kind.

A kind says which roles it needs and may have, and builds its part, or tells what is
wrong. Every role that a module has is used by the kind that takes it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lora_jax.adapters.built import (
    NO_SCALE,
    Builder,
    Built,
    Tensor,
    Tensors,
    pair_faults,
    rank_faults,
)
from lora_jax.adapters.config import Meaning
from lora_jax.adapters.experts import (
    build_expert_pairs,
    build_experts,
    is_experts,
    names_parameter,
)
from lora_jax.adapters.names import Role
from lora_jax.adapters.parts import (
    DoRA,
    EmbeddingLowRank,
    FullModule,
    LoRABias,
    LowRank,
    ReplacedBias,
    TokenRows,
)


def build_low_rank(module: str, tensors: Tensors, meaning: Meaning) -> Built:
    """Builds the update of a linear layer, with what else was trained of the layer."""
    a, b = tensors[Role.A], tensors[Role.B]
    found = pair_faults(module, a, b)
    if found:
        return Built(None, "", tuple(found))
    rank, d_out = a.array.shape[0], b.array.shape[0]
    found += rank_faults(module, rank, meaning)
    found += _declared_faults(module, tensors, meaning)
    for role in (Role.LORA_BIAS, Role.MAGNITUDE, Role.BASE_BIAS):
        found += _vector_faults(module, tensors.get(role), d_out)
    if found:
        return Built(None, "", tuple(found))
    scale, rule = meaning.scale_of(module, rank)
    part = LowRank(a.array, b.array, scale)
    if Role.LORA_BIAS in tensors:
        part = LoRABias(part, tensors[Role.LORA_BIAS].array)
    elif Role.MAGNITUDE in tensors:
        part = DoRA(part, _vector(tensors[Role.MAGNITUDE]))
    if Role.BASE_BIAS in tensors:
        part = ReplacedBias(part, tensors[Role.BASE_BIAS].array)
    return Built(part, rule, ())


def build_embedding(module: str, tensors: Tensors, meaning: Meaning) -> Built:
    """Builds the update of an embedding."""
    a, b = tensors[Role.EMBEDDING_A], tensors[Role.EMBEDDING_B]
    found = pair_faults(module, a, b)
    if found:
        return Built(None, "", tuple(found))
    rank = a.array.shape[0]
    found += rank_faults(module, rank, meaning)
    found += _vector_faults(module, tensors.get(Role.MAGNITUDE), b.array.shape[0])
    if meaning.dora is not None and meaning.dora != (Role.MAGNITUDE in tensors):
        found.append(_declared_fault(module, "use_dora", meaning.dora))
    if found:
        return Built(None, "", tuple(found))
    scale, rule = meaning.scale_of(module, rank)
    part = EmbeddingLowRank(a.array, b.array, scale)
    if Role.MAGNITUDE in tensors:
        return Built(DoRA(part, _vector(tensors[Role.MAGNITUDE])), rule, ())
    return Built(part, rule, ())


def build_full_module(module: str, tensors: Tensors, meaning: Meaning) -> Built:
    """Builds a module that is replaced as a whole."""
    weight = tensors[Role.WEIGHT].array
    found = []
    if weight.ndim == 0 or 0 in weight.shape:
        found.append(f"{module}: {tensors[Role.WEIGHT].name} has shape {weight.shape}")
    else:
        found += _vector_faults(module, tensors.get(Role.BIAS), weight.shape[0])
    if found:
        return Built(None, "", tuple(found))
    bias = tensors[Role.BIAS].array if Role.BIAS in tensors else None
    return Built(FullModule(weight, bias), NO_SCALE, ())


def build_bias(module: str, tensors: Tensors, meaning: Meaning) -> Built:
    """Builds the replaced bias of a layer that has no low-rank update."""
    tensor = tensors.get(Role.BIAS) or tensors[Role.BASE_BIAS]
    found = []
    if Role.BIAS in tensors and Role.BASE_BIAS in tensors:
        found.append(f"{module}: has two biases, .bias and .base_layer.bias; keep one")
    found += _vector_faults(module, tensor, tensor.array.size)
    if found:
        return Built(None, "", tuple(found))
    return Built(ReplacedBias(None, tensor.array), NO_SCALE, ())


def build_tokens(module: str, tensors: Tensors, meaning: Meaning) -> Built:
    """Builds the replaced rows of an embedding or head."""
    tensor = tensors[Role.TOKENS]
    indices = meaning.indices_of(module)
    if indices is None:
        text = "trainable_token_indices does not name the module; add its token ids"
        return Built(None, "", (f"{module}: {text}",))
    if tensor.array.ndim != 2 or tensor.array.shape[0] != len(indices):
        text = (
            f"{tensor.name} has shape {tensor.array.shape}, expected one row for each "
            f"of the {len(indices)} trainable_token_indices"
        )
        return Built(None, "", (f"{module}: {text}",))
    return Built(TokenRows(indices, tensor.array), NO_SCALE, ())


@dataclass(frozen=True)
class Kind:
    """A row of `KINDS`.

    Attributes:
      needs: roles that the module must have.
      may_have: roles that it may have besides.
      build: builds the part.
      applies: whether a module of this path can be of the kind.
    """

    needs: frozenset[Role]
    may_have: frozenset[Role]
    build: Builder
    applies: Callable[[str], bool] = lambda module: True


def _kind(needs: set[Role], may_have: set[Role], build: Builder) -> Kind:
    return Kind(frozenset(needs), frozenset(may_have), build)


KINDS: tuple[Kind, ...] = (
    Kind(frozenset({Role.A, Role.B}), frozenset(), build_experts, is_experts),
    Kind(frozenset({Role.A, Role.B}), frozenset(), build_expert_pairs, names_parameter),
    _kind(
        {Role.A, Role.B},
        {Role.LORA_BIAS, Role.MAGNITUDE, Role.BASE_BIAS},
        build_low_rank,
    ),
    _kind({Role.EMBEDDING_A, Role.EMBEDDING_B}, {Role.MAGNITUDE}, build_embedding),
    _kind({Role.WEIGHT}, {Role.BIAS}, build_full_module),
    _kind({Role.TOKENS}, set(), build_tokens),
    _kind({Role.BIAS}, {Role.BASE_BIAS}, build_bias),
    _kind({Role.BASE_BIAS}, set(), build_bias),
)
"""The first row whose roles cover the module's counts."""


def _declared_faults(module: str, tensors: Tensors, meaning: Meaning) -> list[str]:
    """Faults of a kind that the config and the tensors do not agree on."""
    found = []
    for field, declared, role in (
        ("use_dora", meaning.dora, Role.MAGNITUDE),
        ("lora_bias", meaning.lora_bias, Role.LORA_BIAS),
    ):
        if declared is not None and declared != (role in tensors):
            found.append(_declared_fault(module, field, declared))
    if Role.MAGNITUDE in tensors and Role.LORA_BIAS in tensors:
        found.append(f"{module}: DoRA and a LoRA bias together have no meaning in PEFT")
    if Role.BASE_BIAS in tensors and meaning.bias == "none":
        found.append(f"{module}: has a trained bias, but the config says bias='none'")
    return found


def _declared_fault(module: str, field: str, declared: bool) -> str:
    there = "no tensor of it" if declared else "a tensor of it"
    return f"{module}: the config says {field}={declared}, the file has {there}"


def _vector(tensor: Tensor) -> np.ndarray:
    """The values as one axis; PEFT 0.9 wrote magnitudes as one row."""
    return tensor.array.reshape(-1)


def _vector_faults(module: str, tensor: Tensor | None, length: int) -> list[str]:
    if tensor is None:
        return []
    row = (1, length) if "lora_magnitude_vector" in tensor.name else None
    if tensor.array.shape in ((length,), row) and length:
        return []
    return [
        f"{module}: {tensor.name} has shape {tensor.array.shape}, expected ({length},)"
    ]
