"""The meaning of `grouped_dot`, in a few lines; everything else must agree with it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lora_kernels.grouped_dot.shapes import Kernel
from lora_kernels.routing import Routing

EXACT = jax.lax.Precision.HIGHEST


def grouped_dot(
    x: Float[Array, "rows d_in"],
    kernel: Kernel,
    pairs: Routing,
) -> Float[Array, "pairs d_out"]:
    """Returns each pair's product; see `api.grouped_dot`.

    Gathers every pair's own kernel, so it needs `pairs * d_in * d_out` of memory: for
    tests, not for use.
    """
    wide = jnp.promote_types(jnp.float32, jnp.result_type(x, kernel))
    count = pairs.slot.shape[0]
    x_of_pair = jnp.repeat(x, count // max(x.shape[0], 1), axis=0).astype(wide)
    own = kernel[jnp.maximum(pairs.slot, 0)].astype(wide)
    out = jnp.einsum("pi,pio->po", x_of_pair, own, precision=EXACT)
    return jnp.where((pairs.slot >= 0)[:, None], out, 0).astype(x.dtype)
