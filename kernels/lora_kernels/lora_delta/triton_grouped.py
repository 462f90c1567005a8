"""Products whose ragged side is summed: the gradients of A and B, slot by slot.

    out[slot, part, r] = sum over the slot's rows of factor * h[row, part, r] * v[row]

One program owns one tile of the output and walks the slot's rows, so no two programs
add to the same number. A slot without rows, and ranks from a slot's own on, get exact
zeros: the output needs no fill.
"""

from typing import no_type_check

import triton
import triton.language as tl

from lora_kernels.lora_delta.triton_math import part_columns
from lora_kernels.triton_product import product_of_float32


@triton.jit
@no_type_check
def grouped_kernel(
    h_ptr,  # float32 (SPLITS, tokens, PARTS * MAX_RANK), rows sorted by slot
    v_ptr,  # (TOKENS / TOKENS_PER_ROW, V_STRIDE)
    scale_ptr,  # float32 (slots, PARTS)
    rank_ptr,  # int32 (slots, PARTS)
    weight_ptr,  # float32 (tokens,)
    order_ptr,  # int32 (tokens,)
    starts_ptr,  # int32 (slots + 2,)
    out_ptr,  # (slots, PARTS, MAX_RANK, V_STRIDE) if SHARED, else (slots, MAX_RANK, ..)
    TOKENS: tl.constexpr,
    TOKENS_PER_ROW: tl.constexpr,  # tokens in turn that share a row of v
    SPLITS: tl.constexpr,
    V_STRIDE: tl.constexpr,
    WIDTHS: tl.constexpr,  # columns of each part of v; equal and shared if SHARED
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Writes one tile of out. Grid: slots and column tiles, parts and rank blocks."""
    rank_blocks: tl.constexpr = (MAX_RANK + BLOCK_RANK - 1) // BLOCK_RANK
    part = tl.program_id(1) // rank_blocks
    r = (tl.program_id(1) % rank_blocks) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    slot = (tl.program_id(0) // COLUMN_TILES).to(tl.int64)
    if SHARED:
        column = 0
        width = V_STRIDE
        out_row = (slot * PARTS + part) * MAX_RANK
    else:
        column, width = part_columns(part, WIDTHS)
        out_row = slot * MAX_RANK
    n = (tl.program_id(0) % COLUMN_TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < width
    rank = tl.minimum(tl.load(rank_ptr + slot * PARTS + part), MAX_RANK)
    kept = r < rank
    first = tl.load(starts_ptr + slot + 1)
    stop = tl.load(starts_ptr + slot + 2)
    if tl.sum(kept.to(tl.int32), axis=0) == 0:
        stop = first
    scale = tl.load(scale_ptr + slot * PARTS + part)
    total = tl.zeros([BLOCK_RANK, BLOCK_N], tl.float32)
    for at in tl.range(first, stop, BLOCK_ROWS, num_stages=STAGES):
        position = at + tl.arange(0, BLOCK_ROWS)
        live = position < stop
        token = tl.load(order_ptr + position, mask=live, other=0)
        factor = scale * tl.load(weight_ptr + token, mask=live, other=0.0)
        where = position[None, :] * (PARTS * MAX_RANK) + (part * MAX_RANK + r)[:, None]
        mask = live[None, :] & kept[:, None]
        h = tl.load(h_ptr + where, mask=mask, other=0.0)
        for split in range(1, SPLITS):
            partial = h_ptr + split * (TOKENS * PARTS * MAX_RANK)
            h += tl.load(partial + where, mask=mask, other=0.0)
        v_row = token // TOKENS_PER_ROW
        v_tile = v_row[:, None] * V_STRIDE + n[None, :]
        v_mask = live[:, None] & inside[None, :]
        v = tl.load(v_ptr + column + v_tile, mask=v_mask, other=0.0)
        total = product_of_float32(h * factor[None, :], v, total)
    # The tails of h are zeros, but not their product with a NaN of the slot's own rows.
    total = tl.where(kept[:, None], total, 0.0)
    out = out_ptr + out_row * V_STRIDE + column
    out_tile = r[:, None] * V_STRIDE + n[None, :]
    mask = (r < MAX_RANK)[:, None] & inside[None, :]
    tl.store(out + out_tile, total.to(out_ptr.dtype.element_ty), mask=mask)
