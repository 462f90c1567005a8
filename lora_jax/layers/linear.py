"""LoRA for a linear layer, plain or fused: `y + scale * (x A^T) B`, per row.

Slot layout, for a layer of `parts` fused children (one for a plain layer):

    a      (slots, parts, max_rank, d_in)   rows contiguous along the wide axis
    b      (slots, max_rank, d_out)         part p owns its own columns of every row
    scale  (slots, parts) float32           applied in float32 on the rank-sized product
    rank   (slots, parts) int32             0: this slot does not adapt this part

The base layer's own forward runs first, whatever it does; the delta is added after.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters import AdapterPart, LowRank
from lora_jax.layers.base import HostSlot, LoRALayer, SlotSpec
from lora_kernels import lora_delta


class LoRALinear(LoRALayer):
    """Mixin over a layer that maps `(..., d_in)` to `(..., d_out)`."""

    # The base layer's further arguments (`out_sharding=`) pass through untouched.
    def __call__(self, inputs: jax.Array, *args: object, **kwargs: object) -> jax.Array:
        """Returns the base layer's output plus each row's low-rank update.

        Args:
          inputs: `(..., d_in)`; flattened, its rows are the routing's rows.
        Raises:
          ValueError: if the routing was made for another number of rows.
        """
        outputs = super().__call__(inputs, *args, **kwargs)  # type: ignore[misc]
        routing = self.lora_routing.get_value()
        if routing is None:
            return outputs
        site, slots = self.lora_site, self.lora_slots.get_value()
        rows = inputs.reshape(-1, site.d_in)
        if rows.shape[0] != routing.slot.shape[0]:
            raise ValueError(
                f"{site.name}: the routing names {routing.slot.shape[0]} rows, but the "
                f"layer sees {rows.shape[0]}; give one id per row ({site.domain})."
            )
        updated = lora_delta(
            rows,
            outputs.reshape(-1, site.d_out),
            slots["a"],
            slots["b"],
            scale=slots["scale"],
            rank=slots["rank"],
            routing=routing,
            part_widths=site.part_widths,
        )
        return updated.reshape(outputs.shape)

    def slot_spec(self, dtype: jax.typing.DTypeLike) -> SlotSpec:
        """Returns the layout in this file's docstring, less the slot axis."""
        site, parts = self.lora_site, len(self.lora_site.parts)
        return {
            "a": jax.ShapeDtypeStruct((parts, site.max_rank, site.d_in), dtype),
            "b": jax.ShapeDtypeStruct((site.max_rank, site.d_out), dtype),
            "scale": jax.ShapeDtypeStruct((parts,), jnp.float32),
            "rank": jax.ShapeDtypeStruct((parts,), jnp.int32),
        }

    def faults(self, part: int | None, weights: AdapterPart) -> list[str]:
        """Returns why a pair cannot sit here: its kind, its widths, its rank."""
        if not isinstance(weights, LowRank):
            kind = type(weights).__name__
            return [f"a {kind} cannot be served by a linear layer; only LowRank pairs."]
        site = self.lora_site
        d_out = site.d_out if part is None else site.part_widths[part]
        rank, d_in = weights.a.shape
        found = []
        if d_in != site.d_in:
            found.append(f"lora_A has input width {d_in}, the layer has {site.d_in}.")
        if weights.b.shape[0] != d_out:
            found.append(
                f"lora_B has output width {weights.b.shape[0]}, the layer has {d_out}."
            )
        if rank > site.max_rank:
            found.append(
                f"rank {rank} exceeds max_lora_rank={site.max_rank}; "
                "raise max_lora_rank or retrain."
            )
        return found

    def pack(
        self, weights: Mapping[int | None, AdapterPart], dtype: np.dtype
    ) -> HostSlot:
        """Returns one slot's host arrays at this adapter's own largest rank.

        A pair for the whole fused layer (key None) lends its A to every part and its B
        rows to the part that owns them.
        """
        site = self.lora_site
        pairs = _per_part(weights, site.part_widths)
        rank = max(pair.a.shape[0] for pair in pairs.values())
        a = np.zeros((len(site.parts), rank, site.d_in), dtype)
        b = np.zeros((rank, site.d_out), dtype)
        scale = np.zeros(len(site.parts), np.float32)
        ranks = np.zeros(len(site.parts), np.int32)
        starts = np.cumsum([0, *site.part_widths])
        for part, pair in pairs.items():
            own = pair.a.shape[0]
            a[part, :own] = pair.a
            b[:own, starts[part] : starts[part + 1]] = pair.b.T
            scale[part], ranks[part] = pair.scale, own
        return {"a": a, "b": b, "scale": scale, "rank": ranks}


def _per_part(
    weights: Mapping[int | None, AdapterPart], widths: tuple[int, ...]
) -> dict[int, LowRank]:
    pairs = {part: pair for part, pair in weights.items() if part is not None}
    whole = weights.get(None)
    if isinstance(whole, LowRank):
        starts = np.cumsum([0, *widths])
        for part in range(len(widths)):
            rows = whole.b[starts[part] : starts[part + 1]]
            pairs[part] = LowRank(whole.a, rows, whole.scale)
    return pairs  # type: ignore[return-value]
