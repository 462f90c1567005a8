"""Shrink and expand over row tiles of one slot each: prefill, training, backward.

The low-rank intermediate of all parts, `h (splits, tokens, parts * MAX_RANK)`, lies in
memory in between, in the sorted order of the rows and in float32. A shrink program
writes its piece of the long axis as a partial of its own and expand adds the partials,
so nothing needs zeros beforehand or atomics, and the order of the sum is fixed.

Both run in two directions. Forward, the parts share the columns of x and own columns of
y; backward (`g` for x, b for a, and the other way round), they own columns of g and
share the columns of dx. Where columns are shared, the ranks of all parts are one
compact list, so x is read once for every BLOCK_RANK of them, not once a part, and
absent parts cost nothing:

    row of the list     0 .. r0-1 | r0 .. r0+r1-1 | ...
    row of a's slot     0 .. r0-1 | MAX_RANK ..   | ...    (also its column of h)
"""

from typing import no_type_check

import triton
import triton.language as tl

from lora_kernels.lora_delta.triton_math import (
    compact_rank_count,
    compact_ranks,
    part_columns,
    part_tiles,
)
from lora_kernels.triton_product import product, product_of_float32


@triton.jit
@no_type_check
def shrink_kernel(
    x_ptr,  # (TOKENS / TOKENS_PER_ROW, X_STRIDE)
    w_ptr,  # (slots, rows, X_STRIDE)
    rank_ptr,  # int32 (slots, PARTS)
    order_ptr,  # int32 (tokens,)
    item_slot_ptr,  # int32 (items,)
    item_start_ptr,  # int32 (items,)
    item_stop_ptr,  # int32 (items,)
    item_count_ptr,  # int32 ()
    h_ptr,  # float32 (splits, tokens, PARTS * MAX_RANK)
    TOKENS: tl.constexpr,
    TOKENS_PER_ROW: tl.constexpr,  # tokens in turn that share a row of x
    X_STRIDE: tl.constexpr,
    WIDTHS: tl.constexpr,  # columns of each part; of all parts if SHARED
    SLOT_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SHARED: tl.constexpr,  # parts share their columns of x
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_SPLIT: tl.constexpr,  # columns of one split, a multiple of BLOCK_K
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Writes one split of `h = x @ w.T` of a row tile. Grid: items, splits, columns."""
    item = tl.program_id(0)
    split = tl.program_id(1)
    part = tl.program_id(2)
    if item < tl.load(item_count_ptr):
        slot = tl.load(item_slot_ptr + item).to(tl.int64)
        first = tl.load(item_start_ptr + item)
        stop = tl.load(item_stop_ptr + item)
        column, width = part_columns(part, WIDTHS)
        k_first = split * K_SPLIT
        k_stop = tl.minimum(k_first + K_SPLIT, width)
        position = first + tl.arange(0, BLOCK_ROWS)
        live = position < stop
        token = tl.load(order_ptr + position, mask=live, other=0)
        k = tl.arange(0, BLOCK_K)
        x_row = token // TOKENS_PER_ROW
        x_tile = x_row[:, None] * X_STRIDE + k[None, :]
        if SHARED:
            ranks = compact_rank_count(rank_ptr + slot * PARTS, PARTS, MAX_RANK)
        else:
            ranks = tl.minimum(tl.load(rank_ptr + slot * PARTS + part), MAX_RANK)
        for rank_first in range(0, ranks, BLOCK_RANK):
            r = rank_first + tl.arange(0, BLOCK_RANK)
            kept = r < ranks
            if SHARED:
                row, _ = compact_ranks(rank_ptr + slot * PARTS, r, PARTS, MAX_RANK)
                h_column = row
            else:
                row = r
                h_column = part * MAX_RANK + r
            w_tile = row[None, :] * X_STRIDE + k[:, None]
            x = x_ptr + column
            w = w_ptr + slot * SLOT_STRIDE + column
            total = tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32)
            for k_at in tl.range(k_first, k_stop, BLOCK_K, num_stages=STAGES):
                x_mask = live[:, None]
                w_mask = kept[None, :]
                if not EVEN_K:
                    inside = k_at + k < k_stop
                    x_mask = x_mask & inside[None, :]
                    w_mask = w_mask & inside[:, None]
                x_block = tl.load((x + k_at) + x_tile, mask=x_mask, other=0.0)
                w_block = tl.load((w + k_at) + w_tile, mask=w_mask, other=0.0)
                total = product(x_block, w_block, total)
            h = h_ptr + split * (TOKENS * PARTS * MAX_RANK)
            where = position[:, None] * (PARTS * MAX_RANK) + h_column[None, :]
            tl.store(h + where, total, mask=live[:, None] & kept[None, :])


@triton.jit
@no_type_check
def expand_kernel(  # noqa: C901
    h_ptr,  # float32 (SPLITS, tokens, PARTS * MAX_RANK)
    y_ptr,  # (tokens, Y_STRIDE): the buffer of out_ptr, through which it is read
    w_ptr,  # (slots, rows, Y_STRIDE)
    scale_ptr,  # float32 (slots, PARTS)
    rank_ptr,  # int32 (slots, PARTS)
    weight_ptr,  # float32 (tokens,)
    order_ptr,  # int32 (tokens,)
    item_slot_ptr,  # int32 (items,)
    item_start_ptr,  # int32 (items,)
    item_stop_ptr,  # int32 (items,)
    item_count_ptr,  # int32 ()
    out_ptr,  # (tokens, Y_STRIDE)
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    WIDTHS: tl.constexpr,  # columns of each part; of all parts if SHARED
    SLOT_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SHARED: tl.constexpr,  # parts share their columns of y
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    """Adds `(h * scale * weight) @ w` into one tile of y. Grid: column tiles, items."""
    tile = tl.program_id(0)
    item = tl.program_id(1)
    if item < tl.load(item_count_ptr):
        part = 0
        part_first = 0
        for p in tl.static_range(1, len(WIDTHS)):
            p_first, _ = part_tiles(p, WIDTHS, BLOCK_N)
            part = tl.where(tile >= p_first, p, part)
            part_first = tl.where(tile >= p_first, p_first, part_first)
        column, width = part_columns(part, WIDTHS)
        slot = tl.load(item_slot_ptr + item).to(tl.int64)
        if SHARED:
            ranks = compact_rank_count(rank_ptr + slot * PARTS, PARTS, MAX_RANK)
        else:
            ranks = tl.minimum(tl.load(rank_ptr + slot * PARTS + part), MAX_RANK)
        if ranks > 0:
            position = tl.load(item_start_ptr + item) + tl.arange(0, BLOCK_ROWS)
            live = position < tl.load(item_stop_ptr + item)
            token = tl.load(order_ptr + position, mask=live, other=0)
            weight = tl.load(weight_ptr + token, mask=live, other=0.0)
            n = tl.arange(0, BLOCK_N)
            n_first = (tile - part_first) * BLOCK_N
            inside = n_first + n < width
            w = w_ptr + slot * SLOT_STRIDE + column + n_first
            total = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
            for rank_first in range(0, ranks, BLOCK_RANK):
                r = rank_first + tl.arange(0, BLOCK_RANK)
                kept = r < ranks
                if SHARED:
                    row, own = compact_ranks(
                        rank_ptr + slot * PARTS, r, PARTS, MAX_RANK
                    )
                    h_column = row
                else:
                    row = r
                    own = part
                    h_column = part * MAX_RANK + r
                h_mask = live[:, None] & kept[None, :]
                where = position[:, None] * (PARTS * MAX_RANK) + h_column[None, :]
                h = tl.load(h_ptr + where, mask=h_mask, other=0.0)
                for split in range(1, SPLITS):
                    partial = h_ptr + split * (TOKENS * PARTS * MAX_RANK)
                    h += tl.load(partial + where, mask=h_mask, other=0.0)
                scale = tl.load(scale_ptr + slot * PARTS + own + 0 * r, mask=kept)
                h = tl.where(h_mask, h * scale[None, :] * weight[:, None], 0.0)
                w_mask = kept[:, None]
                if not EVEN_N:
                    w_mask = w_mask & inside[None, :]
                w_tile = row[:, None] * Y_STRIDE + n[None, :]
                w_block = tl.load(w + w_tile, mask=w_mask, other=0.0)
                total = product_of_float32(h, w_block, total)
            mask = live[:, None]
            if not EVEN_N:
                mask = mask & inside[None, :]
            out = out_ptr + column + n_first
            out_tile = token[:, None] * Y_STRIDE + n[None, :]
            total += tl.load(out + out_tile, mask=mask, other=0.0).to(tl.float32)
            tl.store(out + out_tile, total.to(out_ptr.dtype.element_ty), mask=mask)
