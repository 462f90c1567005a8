"""Which base layers can carry LoRA, and how: the WRAPPERS table.

A new kind of layer is a new file and a row here. A subclass of a row's type counts as
that type, and its own forward is kept.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flax import nnx

from lora_jax.layers.base import LoRALayer, Shape
from lora_jax.layers.classifier import LoRAClassifier
from lora_jax.layers.einsum import describe_einsum, describe_general
from lora_jax.layers.embed import LoRAEmbed, describe_embed
from lora_jax.layers.experts import LoRAExperts, describe_experts
from lora_jax.layers.head import LoRAHead
from lora_jax.layers.linear import (
    LoRALinear,
    describe_fused,
    describe_kernel,
    describe_linear,
)
from lora_jax.models.experts import ExpertLinear
from lora_jax.models.head import TiedHead
from lora_jax.models.linear import FusedLinear


@dataclass(frozen=True)
class Wrapper:
    """One row of WRAPPERS: how a base layer type becomes a LoRA layer.

    Attributes:
      kind: name for reports.
      mixin: the LoRA layer, to be placed before the base type.
      describe: widths, parts and axes of a base layer, given its own last name; raises
        ModelError if this one layer cannot carry LoRA.
    """

    kind: str
    mixin: type[LoRALayer]
    describe: Callable[..., Shape]


WRAPPERS: Mapping[type[nnx.Module], Wrapper] = {
    TiedHead: Wrapper("head", LoRAHead, describe_linear),
    FusedLinear: Wrapper("fused", LoRALinear, describe_fused),
    nnx.Linear: Wrapper("linear", LoRALinear, describe_linear),
    nnx.LinearGeneral: Wrapper("linear", LoRALinear, describe_general),
    nnx.Einsum: Wrapper("einsum", LoRALinear, describe_einsum),
    nnx.Embed: Wrapper("embed", LoRAEmbed, describe_embed),
    ExpertLinear: Wrapper("experts", LoRAExperts, describe_experts),
}
"""Most special type first: the first row that the layer is an instance of decides."""

KERNEL_WRAPPER = Wrapper("kernel", LoRALinear, describe_kernel)
"""For callable layers of other people that hold a 2-D `kernel` `(d_in, d_out)`."""

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings")
"""Last names of embeddings whose rows are tokens; others (positions, types) are not."""

HEAD_WRAPPERS: Mapping[str, Wrapper] = {
    "lm_head": Wrapper("head", LoRAHead, describe_linear),
    "score": Wrapper("classifier", LoRAClassifier, describe_linear),
    "classifier": Wrapper("classifier", LoRAClassifier, describe_linear),
}
"""Name of a head, or of a module of which linear layers make up the head -> its row:
its rows are one for each sampled token or pooled prompt, not one for each token."""

POOLED = frozenset({*HEAD_WRAPPERS, "pooler"})
"""Names in the path of a layer that sees one row for each prompt."""

LABELS = frozenset({"score", "classifier", "out_proj"})
"""Last names of the layers whose outputs are a classifier's labels."""


def wrapper_of(layer: nnx.Module, name: str) -> Wrapper | None:
    """Returns the row of a layer with this path; None if it cannot carry LoRA."""
    row = next((row for kind, row in WRAPPERS.items() if isinstance(layer, kind)), None)
    if row is not None:
        last = name.rpartition(".")[2]
        if row.mixin is LoRAEmbed and last not in EMBEDDINGS:
            return None
        heads = [HEAD_WRAPPERS[c] for c in name.split(".") if c in HEAD_WRAPPERS]
        return heads[0] if heads and row.mixin is LoRALinear else row
    kernel = vars(layer).get("kernel")
    known_by_kernel = isinstance(kernel, nnx.Param) and len(kernel.shape) == 2
    return KERNEL_WRAPPER if known_by_kernel and callable(layer) else None
