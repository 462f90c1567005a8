"""`grouped_dot` in plain jnp: right on every backend that XLA has.

Chooses the form by shapes and platform alone; the forms are in `xla_forms`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lora_kernels.grouped_dot import xla_forms
from lora_kernels.grouped_dot.shapes import Kernel
from lora_kernels.routing import Routing


def grouped_dot(
    x: Float[Array, "rows d_in"],
    kernel: Kernel,
    pairs: Routing,
) -> Float[Array, "pairs d_out"]:
    """Returns each pair's product; see `api.grouped_dot`.

    On a CPU a pair's bits depend on nothing but its row, its group's kernel and the
    row tile, which is chosen by the number of pairs and groups.
    """
    count, (groups, d_in, d_out) = pairs.slot.shape[0], kernel.shape
    if 0 in (count, d_in, d_out):
        return jnp.zeros((count, d_out), x.dtype)
    return jax.lax.platform_dependent(
        cpu=lambda: xla_forms.loop(x, kernel, pairs, block=loop_block(count, groups)),
        default=lambda: xla_forms.batched(
            x, kernel, pairs, block=batched_block(count, groups)
        ),
    ).astype(x.dtype)


def loop_block(pairs: int, groups: int) -> int:
    """Returns the rows of one loop step: near half of an even share, 1 to 64.

    Small steps waste fewer rows, large ones copy a kernel less often.
    """
    return _power_of_two(pairs // (2 * groups), 4 if pairs > 1 else 1, 64)


def batched_block(pairs: int, groups: int) -> int:
    """Returns the rows of one batched item, 16 to 128: near an even share."""
    return _power_of_two(pairs // groups, 16, 128)


def _power_of_two(value: int, least: int, most: int) -> int:
    """Returns the largest power of two up to `value`, within the bounds."""
    return min(max(1 << (max(value, 1).bit_length() - 1), least), most)
