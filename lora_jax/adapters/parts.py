"""What can be done to one module: a type for each kind of change.

Arrays are NumPy, read-only, and hold the file's own values in the file's own dtype
(bfloat16 through `ml_dtypes`): the scale is carried beside them and folded into
nothing, so nothing is scaled twice and writing back is exact.

Kinds nest where they occur together: `ReplacedBias(DoRA(LowRank))`. A type says all, so
a server that does not know a type refuses it instead of dropping a tensor.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class LowRank:
    """A low-rank update of a linear layer: `y += scale * (x @ a.T) @ b.T`.

    Attributes:
      a: `(rank, d_in)`, PEFT's `lora_A.weight`.
      b: `(d_out, rank)`, PEFT's `lora_B.weight`.
      scale: the factor on the product, e.g. alpha / rank.
    """

    kind: ClassVar[str] = "lora"
    a: Float[np.ndarray, "rank d_in"]
    b: Float[np.ndarray, "d_out rank"]
    scale: float

    @property
    def rank(self) -> int:
        """Rank, read from the tensors."""
        return self.a.shape[0]


@dataclass(frozen=True, eq=False)
class LoRABias:
    """A low-rank update with a bias: `y += scale * ((x @ a.T) @ b.T + bias)`.

    Attributes:
      update: the pair and its scale, which the bias shares.
      bias: `(d_out,)`, PEFT's `lora_B.bias`.
    """

    kind: ClassVar[str] = "lora_bias"
    update: LowRank
    bias: Float[np.ndarray, " d_out"]

    @property
    def rank(self) -> int:
        """Rank of the update."""
        return self.update.rank


@dataclass(frozen=True, eq=False)
class EmbeddingLowRank:
    """A low-rank update of an embedding: `y += scale * a[:, token] @ b.T`.

    Attributes:
      a: `(rank, vocab)`, PEFT's `lora_embedding_A`.
      b: `(dim, rank)`, PEFT's `lora_embedding_B`.
      scale: the factor on the product.
    """

    kind: ClassVar[str] = "embedding"
    a: Float[np.ndarray, "rank vocab"]
    b: Float[np.ndarray, "dim rank"]
    scale: float

    @property
    def rank(self) -> int:
        """Rank, read from the tensors."""
        return self.a.shape[0]


@dataclass(frozen=True, eq=False)
class DoRA:
    """A low-rank update whose sum with the base weight is given a new length.

    With `V = W + scale * b @ a`, of shape `(d_out, d_in)`, the new weight is
    `magnitude[:, None] * V / norm(V, axis=1)[:, None]`; the layer's bias is added as it
    is. For an embedding V is `(dim, vocab)`, so there is one length for each feature.

    Attributes:
      update: the pair and its scale.
      magnitude: `(d_out,)`, or `(dim,)` for an embedding; `lora_magnitude_vector`.

    Source: DoRA, https://arxiv.org/abs/2402.09353.
    """

    kind: ClassVar[str] = "dora"
    update: LowRank | EmbeddingLowRank
    magnitude: Float[np.ndarray, " d_out"]

    @property
    def rank(self) -> int:
        """Rank of the update."""
        return self.update.rank


@dataclass(frozen=True, eq=False)
class ReplacedBias:
    """A layer's own bias replaced, unscaled; PEFT's `bias="all"` and `"lora_only"`.

    Attributes:
      update: what else is done to the layer, or None for the bias alone.
      bias: the new bias, `(d_out,)`.
    """

    kind: ClassVar[str] = "bias"
    update: LowRank | LoRABias | DoRA | None
    bias: Float[np.ndarray, " d_out"]

    @property
    def rank(self) -> int:
        """Rank of the update, 0 without one."""
        return 0 if self.update is None else self.update.rank


@dataclass(frozen=True, eq=False)
class FullModule:
    """A module replaced as a whole; PEFT's `modules_to_save`.

    Attributes:
      weight: the new weight as stored in the Hugging Face checkpoint: `(d_out, d_in)`
        for a linear layer, `(vocab, dim)` for an embedding or head (whose vocabulary
        may have another size than the base's), `(dim,)` for a norm.
      bias: the new bias `(d_out,)`, or None where the file has none.
    """

    kind: ClassVar[str] = "full_module"
    rank: ClassVar[int] = 0
    weight: Float[np.ndarray, "..."]
    bias: Float[np.ndarray, " d_out"] | None = None


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows of an embedding or head replaced; PEFT's `trainable_token_indices`.

    Where the base ties its head to the embedding, the head's rows are replaced too.

    Attributes:
      indices: token ids, distinct, in the order of `rows`.
      rows: the new rows, `(tokens, dim)`.
    """

    kind: ClassVar[str] = "tokens"
    rank: ClassVar[int] = 0
    indices: tuple[int, ...]
    rows: Float[np.ndarray, "tokens dim"]


@dataclass(frozen=True, eq=False)
class ExpertsLowRank:
    """Low-rank updates of all experts of a fused expert parameter.

    Attributes:
      a: `(experts * rank, ...)`, the experts slowest: `reshape(experts, rank, -1)`.
      b: `(..., rank * experts)`, the experts fastest: `reshape(-1, rank, experts)`.
      scale: the factor on each expert's product.
      rank: rank of one expert, from the config; divides `a.shape[0]`.
      parameter: the parameter's name by the config, e.g. "gate_up_proj", or "" where
        the config does not tell it.
      peft_version: version of the writing PEFT, "" where unknown.
      swapped: whether the factors are those of the transposed weight, as PEFT up to
        0.18 stores them; None where the file alone does not tell.
    """

    kind: ClassVar[str] = "experts"
    a: Float[np.ndarray, "experts_rank d_in"]
    b: Float[np.ndarray, "d_out experts_rank"]
    scale: float
    rank: int
    parameter: str
    peft_version: str
    swapped: bool | None = None


@dataclass(frozen=True, eq=False)
class ExpertPairs:
    """Low-rank updates of one projection of all experts, a pair for each.

    Either factor may have one expert only: all share it (the "shared outer" layout).

    Attributes:
      a: `(experts or 1, rank, d_in)`.
      b: `(experts or 1, d_out, rank)`.
      scale: the factor on each expert's product.

    Source: vLLM's `enable_moe_shared_loras`; Megatron Bridge.
    """

    kind: ClassVar[str] = "expert_pairs"
    a: Float[np.ndarray, "experts_a rank d_in"]
    b: Float[np.ndarray, "experts_b d_out rank"]
    scale: float

    @property
    def rank(self) -> int:
        """Rank of one expert."""
        return self.a.shape[1]


AdapterPart = (
    LowRank
    | LoRABias
    | EmbeddingLowRank
    | DoRA
    | ReplacedBias
    | FullModule
    | TokenRows
    | ExpertsLowRank
    | ExpertPairs
)
"""What can be done to one module."""


def nested(part: AdapterPart) -> Iterator[AdapterPart]:
    """Yields the part and the parts inside it, outermost first."""
    yield part
    inner = getattr(part, "update", None)
    if inner is not None:
        yield from nested(inner)


def arrays(part: AdapterPart) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and values of each array of a part and the parts inside it."""
    for inner in nested(part):
        for field in dataclasses.fields(inner):
            value = getattr(inner, field.name)
            if isinstance(value, np.ndarray):
                yield f"{inner.kind}.{field.name}", value


def is_zero(part: AdapterPart) -> bool:
    """Whether the part is a low-rank update that is zero, as when untrained."""
    if isinstance(part, LowRank | EmbeddingLowRank | ExpertsLowRank | ExpertPairs):
        return part.scale == 0 or not part.b.any() or not part.a.any()
    return False


def scale_of(part: AdapterPart) -> float:
    """Returns the factor on the part's low-rank product, 1.0 where there is none."""
    *_, innermost = nested(part)
    return getattr(innermost, "scale", 1.0)
