"""A classification head for each adapter: other weights, another number of labels.

`modules_to_save` of a classification adapter holds the whole head. Its arrays enter a
bank with the first such adapter:

    table       (slots, labels, d_in)   the head, rows from the slot's own count on zero
    table_bias  (slots, labels)
    has_table   (slots, 1) int32        how many labels the slot's head has; 0: no head

The output is then as wide as the widest head. A row whose slot has a head gets the
logits of it, any other row the base head's (plus an update as in `linear.py`);
columns beyond a row's own labels are minus infinity.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters import AdapterPart, FullModule
from lora_jax.layers.base import HostSlot, PartKey, SlotSpec
from lora_jax.layers.linear import LoRALinear, add_delta, check_rows, to_rows
from lora_jax.layers.rows import HAS_TABLE, TABLE
from lora_jax.shapes import TOKENS
from lora_kernels import Routing

TABLE_BIAS = "table_bias"
"""Name of the array of heads' biases."""


class LoRAClassifier(LoRALinear):
    """Mixin over a linear head that maps pooled rows `(..., d_in)` to labels."""

    def __call__(self, inputs: jax.Array, *args: object, **kwargs: object) -> jax.Array:
        """Returns each row's logits under its own head.

        Args:
          inputs: `(..., d_in)`, one row for each prompt.
        Returns:
          `(..., labels)`: the base head's labels, or those of the widest head in the
          bank if that is wider; columns beyond a row's own labels are -inf.
        Raises:
          ValueError: if the routing was made for another number of rows.
        """
        outputs = super(LoRALinear, self).__call__(inputs, *args, **kwargs)  # type: ignore[misc]
        routing, slots = self.lora_routing.get_value(), self.lora_slots.get_value()
        if routing is None or set(slots) == {"rank"}:
            return outputs
        rows = to_rows(inputs, (-1,))
        check_rows(self.lora_site, routing, rows)
        logits = outputs.reshape(rows.shape[0], -1)
        if "a" in slots:
            logits = add_delta(self, routing, rows, logits)
        if TABLE in slots:
            logits = _own_heads(logits, rows, routing, slots)
        return logits.reshape(*inputs.shape[:-1], -1)

    def slot_spec(self, dtype: jax.typing.DTypeLike) -> SlotSpec:
        """Returns the array that a slot has whatever its adapter."""
        return {"rank": super().slot_spec(dtype)["rank"]}

    def extra_spec(self, key: str, values: np.ndarray) -> SlotSpec:
        """Returns the layout in this file's docstring, less the slot axis."""
        low_rank = super().slot_spec(values.dtype)
        if key in low_rank:
            return {key: low_rank[key]}
        if key in (TABLE, TABLE_BIAS, HAS_TABLE):
            return {key: jax.ShapeDtypeStruct(values.shape, values.dtype)}
        return super().extra_spec(key, values)

    def faults(self, part: PartKey, weights: AdapterPart) -> list[str]:
        """Returns why a part cannot sit here: its kind, its shape, its labels."""
        site = self.lora_site
        if site.domain == TOKENS:
            return [
                "token_classify only supports LoRA on the model backbone; remove the "
                "weights of the classification head from the adapter."
            ]
        if not isinstance(weights, FullModule):
            return super().faults(part, weights)
        most = site.max_labels or site.d_out
        shape = weights.weight.shape
        found = []
        if len(shape) != 2 or shape[1] != site.d_in or not 1 <= shape[0] <= most:
            found.append(
                f"the head has an incompatible weight shape: expected (1..{most}, "
                f"{site.d_in}), received {shape}; raise max_lora_cls_labels or retrain."
            )
        elif weights.bias is not None and weights.bias.shape != shape[:1]:
            found.append(
                f"the head has an incompatible bias shape: expected ({shape[0]},), "
                f"received {weights.bias.shape}."
            )
        return found

    def pack(
        self,
        weights: Mapping[PartKey, AdapterPart],
        dtype: np.dtype,
        *,
        layer: int | None = None,
    ) -> HostSlot:
        """Returns one slot's host arrays at this adapter's own number of labels."""
        (weight,) = weights.values()
        if not isinstance(weight, FullModule):
            return super().pack(weights, dtype, layer=layer)
        labels = weight.weight.shape[0]
        bias = np.zeros(labels) if weight.bias is None else weight.bias
        return {
            "rank": np.zeros(1, np.int32),
            TABLE: weight.weight.astype(dtype),
            TABLE_BIAS: bias.astype(np.float32),
            HAS_TABLE: np.full(1, labels, np.int32),
        }


def _own_heads(
    logits: jax.Array, rows: jax.Array, routing: Routing, slots: dict[str, jax.Array]
) -> jax.Array:
    at = jnp.maximum(routing.slot, 0)
    count = jnp.where(routing.slot >= 0, slots[HAS_TABLE][at, 0], 0)[:, None]
    new = jnp.einsum(
        "rd,rld->rl", rows, slots[TABLE][at], preferred_element_type=jnp.float32
    )
    new = (new + slots[TABLE_BIAS][at]).astype(logits.dtype)
    labels = max(logits.shape[1], new.shape[1])
    number = jnp.arange(labels, dtype=jnp.int32)[None, :]
    own = jnp.where(number < count, _widened(new, labels), -jnp.inf)
    return jnp.where(count > 0, own, _widened(logits, labels))


def _widened(logits: jax.Array, labels: int) -> jax.Array:
    padding = [(0, 0), (0, labels - logits.shape[1])]
    return jnp.pad(logits, padding, constant_values=-jnp.inf)
