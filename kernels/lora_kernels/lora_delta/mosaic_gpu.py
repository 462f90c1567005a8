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
from lora_kernels.lora_delta.tiles import DECODE_TOKENS
from lora_kernels.routing import Routing, max_work_items, work_list

HOPPER = 90
"""Compute capability that has wgmma; the one after it has other instructions."""

BLOCK_N = (128, 64)
"""Columns of an output tile: the first that divides every part's width."""


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
    block_n = _checked_block_n(x, a, b, part_widths)
    rows = PIECE if x.shape[0] <= DECODE_TOKENS else M
    length = max_work_items(x.shape[0], a.shape[0], rows)
    item_slot, start, stop, _ = work_list(routing.starts, length, rows)
    position = start[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]
    live = position < stop[:, None]  # [items, rows]
    token = routing.order[jnp.minimum(position, x.shape[0] - 1)]
    x_items = jnp.where(live[:, :, None], x[token], 0).swapaxes(1, 2)
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
    return _added(y, delta, start, item_slot, routing)


def _added(
    y: Float[Array, "tokens d_out"],
    delta: Float[Array, "items rows d_out"],
    start: Int32[Array, " items"],
    item_slot: Int32[Array, " items"],
    routing: Routing,
) -> Float[Array, "tokens d_out"]:
    positions = jnp.argsort(routing.order).astype(jnp.int32)
    before = (start[None, :] <= positions[:, None]) & (item_slot >= 0)[None, :]
    item = jnp.maximum(before.sum(axis=1, dtype=jnp.int32) - 1, 0)
    row = jnp.clip(positions - start[item], 0, delta.shape[1] - 1)
    total = (y.astype(jnp.float32) + delta[item, row]).astype(y.dtype)
    return jnp.where((routing.slot >= 0)[:, None], total, y)


def _checked_block_n(
    x: Float[Array, "tokens d_in"],
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
