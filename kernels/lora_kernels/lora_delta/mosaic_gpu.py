"""`lora_delta` in Pallas on Mosaic GPU: NVIDIA Hopper, bfloat16.

XLA gathers the rows of every work item and adds the result back; the two products are
the kernels of `mosaic_kernels`. Decode takes row tiles of 16 and prefill of 64. A row's
bits depend on the row and on the shapes alone.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from lora_kernels.gpu_targets import current_gpu
from lora_kernels.lora_delta.mosaic_kernels import BLOCK_K, PIECE, M, expand, shrink
from lora_kernels.lora_delta.site import tokens_per_row
from lora_kernels.lora_delta.tiles import is_fused
from lora_kernels.lora_delta.xla_forms import item_of_row
from lora_kernels.routing import Routing, max_work_items, work_list

HOPPER = 90
"""Compute capability that has wgmma; the one after it has other instructions."""

BLOCK_N = (128, 64)
"""Columns of an output tile: the first that divides every part's width."""


COPY_BYTES = 2**30
"""Most bytes of the rows that XLA gathers, padded to row tiles: x and the update."""


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
    """Returns `y` plus each token's low-rank update; see `api.lora_delta`."""
    if 0 in (*x.shape, *y.shape, a.shape[2]):
        return y
    block_n = _checked_block_n(x, a, b, part_widths)
    tokens, slots = y.shape[0], a.shape[0]
    rows = PIECE if is_fused(tokens=tokens, slots=slots) else M
    length = max_work_items(tokens, slots, rows)
    _check_copies(length * rows, x, y)
    item_slot, start, stop, _ = work_list(routing.starts, length, rows)
    position = start[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]
    live = position < stop[:, None]  # [items, rows]
    token = routing.order[jnp.minimum(position, tokens - 1)]
    x_row = token // tokens_per_row(x, routing)
    x_items = jnp.where(live[:, :, None], x[x_row], 0).swapaxes(1, 2)
    rank = rank.astype(jnp.int32)
    h = shrink(x_items, a, item_slot, rank)

    own = jnp.maximum(item_slot, 0)
    kept = jnp.arange(a.shape[2])[None, None, :] < rank[own][:, :, None]
    factor = scale[own][:, :, None, None] * routing.weight[token][:, None, None, :]
    h = jnp.where(kept[..., None] & live[:, None, None, :], h * factor, 0)
    h = h.swapaxes(2, 3)  # [items, parts, rows, max_rank]
    padding = ((0, 0), (0, 0), (0, M - rows), (0, -a.shape[2] % M))
    h = jnp.pad(h, padding)
    high = h.astype(b.dtype)
    low = (h - high.astype(jnp.float32)).astype(b.dtype)
    tiles = [width // block_n for width in part_widths]
    part_of_tile = jnp.asarray(np.repeat(np.arange(len(tiles)), tiles), jnp.int32)
    delta = expand(high, low, b, item_slot, rank, part_of_tile, rows=rows)
    total = (y.astype(jnp.float32) + delta[item_of_row(routing, rows)]).astype(y.dtype)
    return jnp.where((routing.slot >= 0)[:, None], total, y)


def _check_copies(
    copied_rows: int,
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
) -> None:
    row_bytes = x.shape[1] * x.dtype.itemsize + y.shape[1] * 4
    if copied_rows * row_bytes > COPY_BYTES:
        raise NotImplementedError(
            f"the rows of all work items would be copied to {copied_rows * row_bytes} "
            f"bytes; at most {COPY_BYTES} are supported"
        )


def _checked_block_n(
    x: Float[Array, "rows d_in"],
    a: Float[Array, "slots parts max_rank d_in"],
    b: Float[Array, "slots max_rank d_out"],
    part_widths: tuple[int, ...],
) -> int:
    capability = current_gpu().compute_capability
    if capability != HOPPER:
        raise NotImplementedError(
            f"needs compute capability 9.0 (Hopper); found {capability / 10}"
        )
    for name, array in {"x": x, "a": a, "b": b}.items():
        if array.dtype != jnp.bfloat16:
            raise NotImplementedError(f"{name} is {array.dtype}; supported: bfloat16")
    if x.shape[1] % BLOCK_K or a.shape[2] % PIECE:
        raise NotImplementedError(
            f"d_in {x.shape[1]} and max_rank {a.shape[2]} must be multiples of "
            f"{BLOCK_K} and {PIECE}"
        )
    for block_n in BLOCK_N:
        if all(width % block_n == 0 for width in part_widths):
            return block_n
    raise NotImplementedError(
        f"part widths {part_widths} must be multiples of {BLOCK_N[-1]}"
    )
