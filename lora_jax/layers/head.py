"""LoRA for a language-model head, whose rows are the sampled tokens.

The same delta as a linear layer; only the rows differ. A head sees one row for each
prompt when the next token is sampled, and every token when a whole sequence is scored,
so it takes the routing that was made for the rows it is given.

All arrays but `rank` enter a bank with the first adapter that adapts the head (most do
not): those of `linear.py`, and of `rows.py` for heads and rows that are replaced.
"""

from collections.abc import Mapping

import jax
import numpy as np

from lora_jax.adapters import AdapterPart, FullModule, TokenRows
from lora_jax.layers.base import HostSlot, LoRARouting, PartKey, SlotSpec
from lora_jax.layers.linear import LoRALinear, add_delta, check_rows, to_rows
from lora_jax.layers.rows import pack_rows, replaced_logits, rows_faults, rows_spec


class LoRAHead(LoRALinear):
    """Mixin over a head that maps `(..., d_in)` to `(..., vocab)`.

    Attributes:
      lora_routing: of the sampled rows.
      lora_token_routing: of all token rows; taken if the head sees that many.
    """

    lora_token_routing: LoRARouting

    def __call__(self, inputs: jax.Array, *args: object, **kwargs: object) -> jax.Array:
        """Returns the base head's logits with each row's change.

        They are wider than the base's if an adapter's own head is (`rows.py`).

        Raises:
          ValueError: if neither sampled rows nor tokens are as many as the inputs.
        """
        outputs = super(LoRALinear, self).__call__(inputs, *args, **kwargs)  # type: ignore[misc]
        routings = (self.lora_routing.get_value(), self.lora_token_routing.get_value())
        made = [routing for routing in routings if routing is not None]
        slots = self.lora_slots.get_value()
        if not made or set(slots) == {"rank"}:
            return outputs
        rows = to_rows(inputs, self.lora_site.shape.in_axes)
        fits = [routing for routing in made if routing.slot.shape[0] == rows.shape[0]]
        if not fits:
            check_rows(self.lora_site, made[0], rows)
        logits = outputs.reshape(rows.shape[0], outputs.shape[-1])
        if "a" in slots:
            logits = add_delta(self, fits[0], rows, logits)
        logits = replaced_logits(logits, rows, fits[0].slot, slots)
        return logits.reshape(*outputs.shape[:-1], logits.shape[-1])

    def slot_spec(self, dtype: jax.typing.DTypeLike) -> SlotSpec:
        """Returns the array that a slot has whatever its adapter."""
        return {"rank": super().slot_spec(dtype)["rank"]}

    def extra_spec(self, key: str, values: np.ndarray) -> SlotSpec:
        """Returns the layout of an array that an adapter of the head brings."""
        low_rank = super().slot_spec(values.dtype)
        if key in low_rank:
            return {key: low_rank[key]}
        return super().extra_spec(key, values) | rows_spec(
            key, values, self.lora_site.d_out
        )

    def faults(self, part: PartKey, weights: AdapterPart) -> list[str]:
        """Returns why a part cannot sit here: its kind, its sizes, its rank."""
        if isinstance(weights, TokenRows | FullModule):
            site = self.lora_site
            found = rows_faults(weights, site.d_out, site.d_in)
            if isinstance(weights, FullModule) and weights.bias is not None:
                found.append("a saved head with a bias cannot be served.")
            return found
        return super().faults(part, weights)

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
        return super().pack(weights, dtype, layer=layer)
