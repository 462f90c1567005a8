"""Pieces that the Triton kernels share: tiles of A and B, columns of a part, ranks.

Functions here run inside a kernel. Rows of A and B are whole ranks, so a rank tail is
cut off by a mask that is constant along the contiguous axis: loads stay as wide as
without it, and nothing behind a slot's rank is read.

The mask is there even where blocks divide the rank axis: a slot's own rank rarely fills
its last block, and a row behind it may hold anything, NaN included, which zeros on the
other side of a product would not undo.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def load_ranks(pointer, first, stride, columns, ranks, WIDTH, EVEN, BLOCK_RANK):
    """Rows `0..ranks` of a rank-major matrix, `(BLOCK_RANK, columns)`, zeros below.

    `columns` are offsets from `first`; those from `WIDTH` on are zeros unless EVEN says
    that there are none.
    """
    r = tl.arange(0, BLOCK_RANK)
    mask = (r < ranks)[:, None]
    if not EVEN:
        mask = mask & (first + columns < WIDTH)[None, :]
    where = (pointer + first) + (r[:, None] * stride + columns[None, :])
    return tl.load(where, mask=mask, other=0.0)


@triton.jit
@no_type_check
def part_columns(part, WIDTHS: tl.constexpr):
    """First output column of a part, and its width."""
    first = 0
    width = WIDTHS[0]
    column = 0
    for p in tl.static_range(1, len(WIDTHS)):
        column += WIDTHS[p - 1]
        first = tl.where(part == p, column, first)
        width = tl.where(part == p, WIDTHS[p], width)
    return first, width


@triton.jit
@no_type_check
def part_tiles(part, WIDTHS: tl.constexpr, BLOCK_N: tl.constexpr):
    """First tile of a part, and how many it has, when parts are cut into BLOCK_N."""
    first = 0
    count = (WIDTHS[0] + BLOCK_N - 1) // BLOCK_N
    tile = 0
    for p in tl.static_range(1, len(WIDTHS)):
        tile += (WIDTHS[p - 1] + BLOCK_N - 1) // BLOCK_N
        first = tl.where(part == p, tile, first)
        count = tl.where(part == p, (WIDTHS[p] + BLOCK_N - 1) // BLOCK_N, count)
    return first, count


@triton.jit
@no_type_check
def compact_rank_count(rank_ptr, PARTS: tl.constexpr, MAX_RANK: tl.constexpr):
    """Sum of a slot's ranks over its parts."""
    count = 0
    for p in tl.static_range(PARTS):
        count += tl.minimum(tl.load(rank_ptr + p), MAX_RANK)
    return count


@triton.jit
@no_type_check
def compact_ranks(rank_ptr, r, PARTS: tl.constexpr, MAX_RANK: tl.constexpr):
    """Row `part * MAX_RANK + rank` and part of the `r`-th rank of all parts in turn."""
    first = 0
    row = r
    part = 0 * r
    for p in tl.static_range(1, PARTS):
        first += tl.minimum(tl.load(rank_ptr + p - 1), MAX_RANK)
        row = tl.where(r >= first, p * MAX_RANK + r - first, row)
        part = tl.where(r >= first, p, part)
    return row, part
