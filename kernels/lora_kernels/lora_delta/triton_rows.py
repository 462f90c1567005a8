"""The low-rank update of one row tile of one slot and part, inside the decode kernel.

First h, then the output tiles. h of one row is computed on CUDA cores (a row with an
adapter of its own reads A once and has nothing to share on a tensor core), h of two or
more rows on tensor cores, whose products have 16 rows at least. When one rank block
holds the largest rank, h stays in registers; else it goes through `h`, memory that only
this program uses.

Offsets are 32 bit: a decode batch has few rows.
"""

from typing import no_type_check

import triton
import triton.language as tl

from lora_kernels.lora_delta.triton_math import (
    load_ranks,
)
from lora_kernels.triton_product import product, product_of_float32


@triton.jit
@no_type_check
def add_delta(
    x,  # pointer to (rows of x, D_IN)
    tokens,  # the tile's token numbers (BLOCK_ROWS,), of which
    rows,  # so many exist
    a,  # pointer to the part's (rank, D_IN)
    b,  # pointer to the part's (rank, width), stride D_OUT
    factor,  # float32 (BLOCK_ROWS,): scale times weight
    rank,
    out,  # pointer to the part's columns of y
    width,
    first,  # output tiles first..stop of the part
    stop,
    h_ptr,  # float32 (BLOCK_ROWS, MAX_RANK)
    TOKENS_PER_ROW: tl.constexpr,  # tokens in turn that share a row of x
    D_IN: tl.constexpr,
    D_OUT: tl.constexpr,
    MAX_RANK: tl.constexpr,
    VECTOR_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    K_GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adds into the output tiles `first..stop` of a part."""
    r = tl.arange(0, BLOCK_RANK)
    n = tl.arange(0, BLOCK_N)
    live = tl.arange(0, BLOCK_ROWS) < rows
    out_tile = tokens[:, None] * D_OUT + n[None, :]
    if BLOCK_RANK >= MAX_RANK:
        h = factor[:, None] * _shrink(
            x,
            tokens,
            rows,
            a,
            rank,
            TOKENS_PER_ROW,
            D_IN,
            VECTOR_ROWS,
            BLOCK_ROWS,
            BLOCK_RANK,
            K_GROUPS,
            BLOCK_K,
            VECTOR_K,
            EVEN_K,
            STAGES,
        )
        for tile in range(first, stop):
            column = tile * BLOCK_N
            b_tile = load_ranks(b, column, D_OUT, n, rank, width, EVEN_N, BLOCK_RANK)
            total = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
            total = product_of_float32(h, b_tile, total)
            _add(out + column, out_tile, live, column + n < width, total, EVEN_N)
    else:
        h_tile = h_ptr + tl.arange(0, BLOCK_ROWS)[:, None] * MAX_RANK + r[None, :]
        tl.debug_barrier()  # the program's previous h has been read
        for rank_first in range(0, rank, BLOCK_RANK):
            ranks = rank - rank_first
            h = factor[:, None] * _shrink(
                x,
                tokens,
                rows,
                a + rank_first * D_IN,
                ranks,
                TOKENS_PER_ROW,
                D_IN,
                VECTOR_ROWS,
                BLOCK_ROWS,
                BLOCK_RANK,
                K_GROUPS,
                BLOCK_K,
                VECTOR_K,
                EVEN_K,
                STAGES,
            )
            tl.store(h_tile + rank_first, h, mask=(r < ranks)[None, :])
        tl.debug_barrier()  # all of h is written
        for tile in range(first, stop):
            column = tile * BLOCK_N
            total = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
            for rank_first in range(0, rank, BLOCK_RANK):
                ranks = rank - rank_first
                h = tl.load(h_tile + rank_first, mask=(r < ranks)[None, :], other=0.0)
                b_rows = b + rank_first * D_OUT
                b_tile = load_ranks(
                    b_rows, column, D_OUT, n, ranks, width, EVEN_N, BLOCK_RANK
                )
                total = product_of_float32(h, b_tile, total)
            _add(out + column, out_tile, live, column + n < width, total, EVEN_N)


@triton.jit
@no_type_check
def _shrink(
    x,
    tokens,
    rows,
    a,
    ranks,
    TOKENS_PER_ROW: tl.constexpr,
    D_IN: tl.constexpr,
    VECTOR_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    K_GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`x @ a.T` of one rank block, float32 `(BLOCK_ROWS, BLOCK_RANK)`."""
    row = tl.arange(0, BLOCK_ROWS)
    if rows <= VECTOR_ROWS:
        h = tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32)
        for i in range(rows):
            token = tl.sum(tl.where(row == i, tokens, 0), axis=0)
            x_row = x + token // TOKENS_PER_ROW * D_IN
            one = _shrink_one(
                x_row, a, ranks, D_IN, BLOCK_RANK, VECTOR_K, EVEN_K, STAGES
            )
            h = tl.where((row == i)[:, None], one[None, :], h)
    else:
        h = _shrink_many(
            x,
            tokens // TOKENS_PER_ROW * D_IN,
            row < rows,
            a,
            ranks,
            D_IN,
            BLOCK_ROWS,
            BLOCK_RANK,
            K_GROUPS,
            BLOCK_K,
            EVEN_K,
            STAGES,
        )
    return h


@triton.jit
@no_type_check
def _shrink_one(
    x_row,
    a,
    ranks,
    D_IN: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`a @ x` of one row on CUDA cores, float32 `(BLOCK_RANK,)`."""
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_RANK, BLOCK_K], tl.float32)
    for first in tl.range(0, D_IN, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x_tile = tl.load(x_row + first + k)
        else:
            x_tile = tl.load(x_row + first + k, mask=first + k < D_IN, other=0.0)
        a_tile = load_ranks(a, first, D_IN, k, ranks, D_IN, EVEN_K, BLOCK_RANK)
        total += a_tile.to(tl.float32) * x_tile.to(tl.float32)[None, :]
    return tl.sum(total, axis=1)


@triton.jit
@no_type_check
def _shrink_many(
    x,
    x_rows,
    live,
    a,
    ranks,
    D_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    K_GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`x @ a.T` on tensor cores, float32 `(BLOCK_ROWS, BLOCK_RANK)`.

    A product this small has no rows and columns for several warps to share, so they
    share the long axis: a batch of K_GROUPS products, summed at the end in fixed order.
    """
    k = tl.arange(0, K_GROUPS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    r = tl.arange(0, BLOCK_RANK)
    x_tile = x_rows[None, :, None] + k[:, None, :]  # (K_GROUPS, BLOCK_ROWS, BLOCK_K)
    a_tile = r[None, None, :] * D_IN + k[:, :, None]  # (.., BLOCK_K, BLOCK_RANK)
    x_mask = live[None, :, None]
    a_mask = (r < ranks)[None, None, :]
    total = tl.zeros([K_GROUPS, BLOCK_ROWS, BLOCK_RANK], tl.float32)
    for first in tl.range(0, D_IN, K_GROUPS * BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x_block = tl.load((x + first) + x_tile, mask=x_mask, other=0.0)
            a_block = tl.load((a + first) + a_tile, mask=a_mask, other=0.0)
        else:
            inside = first + k < D_IN
            x_inside = x_mask & inside[:, None, :]
            a_inside = a_mask & inside[:, :, None]
            x_block = tl.load((x + first) + x_tile, mask=x_inside, other=0.0)
            a_block = tl.load((a + first) + a_tile, mask=a_inside, other=0.0)
        total = product(x_block, a_block, total)
    return tl.sum(total, axis=0)


@triton.jit
@no_type_check
def _add(out, tile, live, inside, total, EVEN_N: tl.constexpr):
    mask = live[:, None]
    if not EVEN_N:
        mask = mask & inside[None, :]
    total += tl.load(out + tile, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + tile, total.to(out.dtype.element_ty), mask=mask)
