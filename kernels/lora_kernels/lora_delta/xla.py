"""`lora_delta` in plain jnp: right on every backend that XLA has.

Chooses, by shapes alone, how the products are laid out; the forms are in `xla_forms`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lora_kernels.lora_delta import xla_forms
from lora_kernels.routing import Routing


def lora_delta(
    x: Float[Array, "tokens d_in"],
    y: Float[Array, "tokens d_out"],
    a: Float[Array, "slots parts max_rank d_in"],
    b: Float[Array, "slots max_rank d_out"],
    *,
    scale: Float[Array, "slots parts"],
    rank: Int32[Array, "slots parts"],
    routing: Routing,
    part_widths: tuple[int, ...],
) -> Float[Array, "tokens d_out"]:
    """Returns `y` plus each token's low-rank update; see `api.lora_delta`."""
    if 0 in (*x.shape, *y.shape, a.shape[2]):
        return y
    site = xla_forms.Site(a, b, scale, rank, part_widths)
    delta = xla_forms.flat(x, site, routing)
    return add_to_adapted_rows(y, delta, routing)


def add_to_adapted_rows(
    y: Float[Array, "tokens d_out"],
    delta: Float[Array, "tokens d_out"],
    routing: Routing,
) -> Float[Array, "tokens d_out"]:
    """Returns `y + delta` in y's dtype; base rows keep the bits of y."""
    total = (y.astype(delta.dtype) + delta).astype(y.dtype)
    return jnp.where((routing.slot >= 0)[:, None], total, y)
