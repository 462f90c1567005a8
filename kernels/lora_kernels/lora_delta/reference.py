"""The meaning of `lora_delta`, in a few lines; everything else must agree with it."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from lora_kernels.lora_delta.site import tokens_per_row
from lora_kernels.routing import Routing

EXACT = jax.lax.Precision.HIGHEST


def lora_delta(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    a: Float[Array, "slots parts max_rank d_in"],
    b: Float[Array, "slots max_rank d_out"],
    *,
    scale: Float[Array, "slots parts"],
    rank: Int32[Array, "slots parts"],
    routing: Routing,
    part_widths: tuple[int, ...],
) -> Float[Array, "tokens d_out"]:
    """Returns `y` plus each token's low-rank update; see `api.lora_delta`.

    Gathers every token's own A and B, so it needs `tokens * max_rank * d` of memory:
    for tests, not for use. Excluded numbers are selected away, never multiplied by 0.
    """
    wide = jnp.promote_types(jnp.float32, x.dtype)
    x = jnp.repeat(x, tokens_per_row(x, routing), axis=0)
    slot = jnp.maximum(routing.slot, 0)
    kept = jnp.arange(a.shape[2])[None, None, :] < rank[slot][:, :, None]  # [t, p, r]
    own_a = jnp.where(kept[..., None], a[slot], 0).astype(wide)
    h = jnp.einsum("ti,tpri->tpr", x.astype(wide), own_a, precision=EXACT)
    strength = jnp.where(rank > 0, scale, 0)[slot] * routing.weight[:, None]
    h = jnp.where(kept, h * strength[:, :, None], 0)
    part = np.repeat(np.arange(len(part_widths)), part_widths)  # of each column
    own_b = jnp.where(kept[:, part].swapaxes(1, 2), b[slot], 0).astype(wide)
    delta = jnp.einsum("tor,tro->to", h[:, part], own_b, precision=EXACT)
    return jnp.where(
        (routing.slot >= 0)[:, None], (y.astype(wide) + delta).astype(y.dtype), y
    )
