"""LoRA for an embedding: `E[token] + scale * a[:, token] B`, per row; or rows replaced.

Slot layout; all but `rank` enter a bank with the first adapter that adapts the
embedding:

    a      (slots, vocab, max_rank)   one row for each token
    b      (slots, max_rank, dim)
    scale  (slots, 1) float32
    rank   (slots, 1) int32           0: this slot adds nothing

and the arrays of `rows.py`, and the `gain` of `extras.py` for DoRA.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters import (
    AdapterPart,
    DoRA,
    EmbeddingLowRank,
    FullModule,
    TokenRows,
)
from lora_jax.layers.base import HostSlot, LoRALayer, PartKey, Shape, SlotSpec, zero
from lora_jax.layers.extras import GAIN, apply_extras, gain_of
from lora_jax.layers.linear import check_rows
from lora_jax.layers.rows import pack_rows, replaced_rows, rows_faults, rows_spec
from lora_kernels import Routing, lora_delta


class LoRAEmbed(LoRALayer):
    """Mixin over an `nnx.Embed`, which maps token ids to `(..., dim)`."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the base embedding with each row's change.

        Args:
          inputs: token ids of any shape; flattened, they are the routing's rows.
        Raises:
          ValueError: if the routing was made for another number of rows.
        """
        outputs = super().__call__(inputs)  # type: ignore[misc]
        routing, slots = self.lora_routing.get_value(), self.lora_slots.get_value()
        if routing is None or set(slots) == {"rank"}:
            return outputs
        tokens = inputs.reshape(-1)
        rows = outputs.reshape(-1, outputs.shape[-1])
        check_rows(self.lora_site, routing, rows)
        if "a" in slots:
            rows = _add_delta(rows, tokens, slots, routing)
        rows = apply_extras(rows, slots, routing, None)
        rows = replaced_rows(rows, tokens, routing.slot, slots)
        return rows.reshape(outputs.shape)

    def slot_spec(self, dtype: jax.typing.DTypeLike) -> SlotSpec:
        """Returns the array that a slot has whatever its adapter."""
        return {"rank": jax.ShapeDtypeStruct((1,), jnp.int32)}

    def extra_spec(self, key: str, values: np.ndarray) -> SlotSpec:
        """Returns the layout in this file's docstring, less the slot axis."""
        site = self.lora_site
        shapes = {
            "a": (site.d_in, site.max_rank),
            "b": (site.max_rank, site.d_out),
            "scale": (1,),
            GAIN: (site.d_out,),
        }
        if key in shapes:
            return {key: jax.ShapeDtypeStruct(shapes[key], values.dtype)}
        return rows_spec(key, values, site.d_in)

    def zeros(self, part: PartKey, rank: int) -> AdapterPart | None:
        """Returns an update of the whole table."""
        site = self.lora_site
        pair = EmbeddingLowRank(zero(rank, site.d_in), zero(site.d_out, rank), 1.0)
        return None if self.faults(part, pair) else pair

    def overlap(self, first: PartKey, second: PartKey) -> bool:
        """Says that two changes of one table always share a place."""
        return True

    def faults(self, part: PartKey, weights: AdapterPart) -> list[str]:
        """Returns why a part cannot sit here: its kind, its sizes, its rank."""
        site = self.lora_site
        if isinstance(weights, TokenRows | FullModule):
            return rows_faults(weights, site.d_in, site.d_out)
        pair = weights.update if isinstance(weights, DoRA) else weights
        if not isinstance(pair, EmbeddingLowRank):
            kind = type(weights).__name__
            return [f"a {kind} cannot be served by an embedding."]
        found = []
        if pair.a.shape[1] != site.d_in:
            found.append(
                f"the embedding LoRA's vocabulary ({pair.a.shape[1]}) must be the base "
                f"model's ({site.d_in})."
            )
        if pair.b.shape[0] != site.d_out:
            found.append(
                f"lora_embedding_B has width {pair.b.shape[0]}, the layer {site.d_out}."
            )
        if pair.rank > site.max_rank:
            found.append(
                f"rank {pair.rank} exceeds max_lora_rank={site.max_rank}; "
                "raise max_lora_rank or retrain."
            )
        return found

    def pack(
        self,
        weights: Mapping[PartKey, AdapterPart],
        dtype: np.dtype,
        *,
        layer: int | None = None,
    ) -> HostSlot:
        """Returns one slot's host arrays at this adapter's own rank."""
        (weight,) = weights.values()
        if isinstance(weight, TokenRows | FullModule):
            return {"rank": np.zeros(1, np.int32)} | pack_rows(weight, dtype)
        pair = weight.update if isinstance(weight, DoRA) else weight
        assert isinstance(pair, EmbeddingLowRank), "faults() refuses other kinds"
        slot = {
            "a": pair.a.T.astype(dtype),
            "b": pair.b.T.astype(dtype),
            "scale": np.array([pair.scale], np.float32),
            "rank": np.array([pair.rank], np.int32),
        }
        gain = gain_of(weight, np.asarray(self.embedding[...]))  # type: ignore[attr-defined]
        return slot if gain is None else slot | {GAIN: gain}


def describe_embed(layer: object, name: str) -> Shape:
    """Returns the shape of an `nnx.Embed`: from a vocabulary to features."""
    return Shape(layer.num_embeddings, ((name, layer.features),))  # type: ignore[attr-defined]


def _add_delta(
    rows: jax.Array, tokens: jax.Array, slots: dict[str, jax.Array], routing: Routing
) -> jax.Array:
    """Adds the update; the op sees the token's row of `a` as its input, and A = 1."""
    num_slots, _, rank = slots["a"].shape
    at = jnp.maximum(routing.slot, 0)
    narrow = slots["a"][at, tokens].astype(jnp.float32)
    own = jnp.arange(rank, dtype=jnp.int32)[None, :] < slots["rank"][at]
    identity = jnp.broadcast_to(
        jnp.eye(rank, dtype=jnp.float32), (num_slots, 1, rank, rank)
    )
    return lora_delta(
        jnp.where(own, narrow, 0.0),
        rows,
        identity,
        slots["b"],
        scale=slots["scale"],
        rank=slots["rank"],
        routing=routing,
        part_widths=(rows.shape[1],),
    )
