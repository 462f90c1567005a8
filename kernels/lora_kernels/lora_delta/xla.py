"""`lora_delta` in plain jnp: right on every backend that XLA has.

Chooses the form by shapes and platform alone; the forms are in `xla_forms`
and `xla_cpu_forms`.
"""

import jax
from jaxtyping import Array, Float, Int32

from lora_kernels.lora_delta import xla_cpu_forms, xla_forms
from lora_kernels.lora_delta.site import Site
from lora_kernels.routing import Routing

GATHER_TOKENS = 64
"""Most tokens for which each row reads its own A and B, where there is no loop."""

ROW_BY_ROW_RANK = 16
"""Largest rank axis for the forms that write the sum over it out on a CPU."""


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

    On a CPU a row's bits depend on nothing but the row, its own slot, and the shapes,
    by which the form and its row tile are chosen.
    """
    if 0 in (*x.shape, *y.shape, a.shape[2]):
        return y
    site = Site(a, b, scale, rank, part_widths)
    return jax.lax.platform_dependent(
        cpu=lambda: _on_cpu(x, y, site, routing),
        default=lambda: _on_accelerator(x, y, site, routing),
    )


def _on_cpu(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    site: Site,
    routing: Routing,
) -> Float[Array, "tokens d_out"]:
    tokens, (slots, _, max_rank, _) = routing.slot.shape[0], site.a.shape
    if flat_fits(tokens, slots, max_rank):
        return xla_cpu_forms.flat(x, y, site, routing)
    if few_fits(tokens, max_rank):
        return xla_cpu_forms.few(x, y, site, routing)
    return xla_cpu_forms.loop(x, y, site, routing, block=loop_block(tokens, slots))


def _on_accelerator(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    site: Site,
    routing: Routing,
) -> Float[Array, "tokens d_out"]:
    tokens = routing.slot.shape[0]
    if tokens <= GATHER_TOKENS:
        return xla_forms.gather(x, y, site, routing)
    block = batched_block(tokens, site.a.shape[0])
    return xla_forms.batched(x, y, site, routing, block=block)


def flat_fits(tokens: int, slots: int, max_rank: int) -> bool:
    """Returns whether a product with A of every slot takes less time than a loop.

    It does in decode over a small bank, unless most rows share an adapter.
    """
    small = max_rank <= ROW_BY_ROW_RANK and slots * max_rank <= 256
    return 8 <= tokens <= 32 and slots <= tokens and small


def few_fits(tokens: int, max_rank: int) -> bool:
    """Returns whether a copy of A for each row takes less time than a loop.

    It does for a handful of rows; up to 16, unless most share an adapter.
    """
    return tokens <= 16 and max_rank <= ROW_BY_ROW_RANK


def loop_block(tokens: int, slots: int) -> int:
    """Returns the rows of one loop step: near an even share, 1 to 128.

    Small steps waste fewer rows, large ones take A and B out of the bank less often.
    """
    return _power_of_two(tokens // slots, 4 if tokens > 2 else 1, 128)


def batched_block(tokens: int, slots: int) -> int:
    """Returns the rows of one batched item, 16 to 128: near an even share."""
    return _power_of_two(tokens // slots, 16, 128)


def _power_of_two(value: int, least: int, most: int) -> int:
    """Returns the largest power of two up to `value`, within the bounds."""
    return min(max(1 << (max(value, 1).bit_length() - 1), least), most)
