"""What some adapters change of a layer besides the low-rank pair: its bias, its gain.

Such arrays enter a bank when the first adapter that needs them arrives (`bank.py`), so
nobody else pays for them:

    bias  (slots, d_out) float32   added to the output: scale * lora_bias, and the new
                                   bias less the base's where the bias is replaced
    gain  (slots, d_out) float32   DoRA's magnitude / norm, less 1

A row of a slot becomes `y + gain * (y - base bias) + weight * bias`, with y the output
after the low-rank update; zeros change nothing, and base rows are kept bit for bit.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters import AdapterPart, DoRA, LoRABias, LowRank, ReplacedBias
from lora_kernels import Routing

BIAS, GAIN = "bias", "gain"
"""Names of the arrays."""

EVERYWHERE = frozenset({BIAS, GAIN})
"""Arrays whose shape a layer knows: with the first, every layer gets its own."""


def apply_extras(
    rows: jax.Array,
    slots: dict[str, jax.Array],
    routing: Routing,
    base_bias: jax.Array | None,
) -> jax.Array:
    """Returns `(rows, d_out)` outputs with each row's gain and bias applied.

    Args:
      rows: outputs of the base layer plus the low-rank update.
      slots: the layer's arrays; without `bias` and `gain` nothing is done.
      base_bias: `(d_out,)` bias that the base layer has added, if it has one.
    """
    if BIAS not in slots and GAIN not in slots:
        return rows
    at = jnp.maximum(routing.slot, 0)
    changed = rows.astype(jnp.float32)
    if GAIN in slots:
        own = 0.0 if base_bias is None else base_bias.reshape(1, -1)
        changed = changed + slots[GAIN][at] * (changed - own)
    if BIAS in slots:
        weighted = slots[BIAS][at] * routing.weight[:, None]
        changed = changed + weighted
    return jnp.where(routing.slot[:, None] >= 0, changed.astype(rows.dtype), rows)


def pair_of(part: AdapterPart) -> LowRank | None:
    """Returns the low-rank pair inside a linear layer's part, if there is one."""
    if isinstance(part, ReplacedBias):
        return None if part.update is None else pair_of(part.update)
    if isinstance(part, LoRABias):
        return part.update
    if isinstance(part, DoRA):
        return part.update if isinstance(part.update, LowRank) else None
    return part if isinstance(part, LowRank) else None


def bias_of(part: AdapterPart, base_bias: np.ndarray | None) -> np.ndarray | None:
    """Returns what the part adds to the output whatever the input, or None."""
    if isinstance(part, LoRABias):
        return part.update.scale * part.bias.astype(np.float32)
    if isinstance(part, ReplacedBias):
        new = part.bias.astype(np.float32)
        change = new if base_bias is None else new - base_bias.astype(np.float32)
        inner = None if part.update is None else bias_of(part.update, base_bias)
        return change if inner is None else change + inner
    return None


def gain_of(part: AdapterPart, kernel: np.ndarray) -> np.ndarray | None:
    """Returns DoRA's factor on each output, less 1, or None for other parts.

    The norm is taken over the input axis of `W + scale * B A`, in float64.

    Args:
      kernel: `(d_in, d_out)` of the base layer, the columns that the part adapts; or
        the `(vocab, dim)` table of an embedding.
    """
    dora = part.update if isinstance(part, ReplacedBias) else part
    if not isinstance(dora, DoRA):
        return None
    pair = dora.update
    update = pair.a.astype(np.float64).T @ pair.b.astype(np.float64).T
    norm = np.linalg.norm(kernel.astype(np.float64) + pair.scale * update, axis=0)
    return (dora.magnitude.astype(np.float64) / norm - 1.0).astype(np.float32)
