"""The grouped products as Triton kernels: of pairs with kernels, and of pairs summed.

A program of the product takes a row tile (one work item: up to BLOCK_ROWS pairs of one
group) and a column tile. Column tiles run fastest, so programs that run together share
their rows and stay within few kernels:

    program     0 1 2 3 | 4 5 6 7 | ...     column tile  program % tiles
    item        0 0 0 0 | 1 1 1 1 | ...     item         program // tiles

Pairs without a group are a group of their own, the first, whose tiles are zeros. A
pair's bits depend on its row, its kernel and the tile sizes alone: rows of a tile do
not meet, and the summed axis is not split.
"""

from typing import no_type_check

import triton
import triton.language as tl

from lora_kernels.triton_product import product


@triton.jit
@no_type_check
def product_kernel(
    x_ptr,  # (rows, K)
    w_ptr,  # (groups, K, N), or (groups, N, K) where W_K_STRIDE is 1
    order_ptr,  # int32 (pairs,)
    item_group_ptr,  # int32 (items,): 0 for pairs without a group, else group + 1
    item_start_ptr,  # int32 (items,)
    item_stop_ptr,  # int32 (items,)
    item_count_ptr,  # int32 ()
    out_ptr,  # (pairs, N)
    PER_ROW: tl.constexpr,  # pairs of one row of x
    K: tl.constexpr,
    N: tl.constexpr,
    W_K_STRIDE: tl.constexpr,
    W_N_STRIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,  # BLOCK_K divides K and BLOCK_N divides N
    STAGES: tl.constexpr,
):
    """Writes one tile of `out = x @ w`. Grid: column tiles, items."""
    item = tl.program_id(1)
    if item < tl.load(item_count_ptr):
        group = tl.load(item_group_ptr + item).to(tl.int64) - 1
        position = tl.load(item_start_ptr + item) + tl.arange(0, BLOCK_ROWS)
        live = position < tl.load(item_stop_ptr + item)
        pair = tl.load(order_ptr + position, mask=live, other=0)
        n_first = tl.program_id(0) * BLOCK_N
        n = tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        k_stop = tl.where(group >= 0, K, 0)
        x_tile = (pair // PER_ROW)[:, None] * K + k[None, :]
        w = w_ptr + tl.maximum(group, 0) * (K * N) + n_first * W_N_STRIDE
        w_tile = k[:, None] * W_K_STRIDE + n[None, :] * W_N_STRIDE
        total = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
        for first in tl.range(0, k_stop, BLOCK_K, num_stages=STAGES):
            x_mask = live[:, None]
            if EVEN:
                w_block = tl.load((w + first * W_K_STRIDE) + w_tile)
            else:
                inside = first + k < K
                x_mask = x_mask & inside[None, :]
                w_mask = inside[:, None] & (n_first + n < N)[None, :]
                w_at = (w + first * W_K_STRIDE) + w_tile
                w_block = tl.load(w_at, mask=w_mask, other=0.0)
            x_block = tl.load((x_ptr + first) + x_tile, mask=x_mask, other=0.0)
            total = product(x_block, w_block, total)
        mask = live[:, None]
        if not EVEN:
            mask = mask & (n_first + n < N)[None, :]
        out_tile = pair[:, None] * N + n[None, :]
        out = total.to(out_ptr.dtype.element_ty)
        tl.store((out_ptr + n_first) + out_tile, out, mask=mask)


@triton.jit
@no_type_check
def gradient_kernel(
    x_ptr,  # (rows, D_IN)
    g_ptr,  # (pairs, D_OUT)
    order_ptr,  # int32 (pairs,)
    starts_ptr,  # int32 (groups + 2,)
    out_ptr,  # (groups, D_IN, D_OUT)
    PER_ROW: tl.constexpr,
    D_IN: tl.constexpr,
    D_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Writes one tile of a group's sum of `x.T @ g`. Grid: d_out, d_in tiles, groups.

    A program walks the group's pairs, so no two add to the same number, and a group
    without pairs gets zeros.
    """
    group = tl.program_id(2)
    i = tl.program_id(1) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    o = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    i_inside = i < D_IN
    o_inside = o < D_OUT
    first = tl.load(starts_ptr + group + 1)
    stop = tl.load(starts_ptr + group + 2)
    total = tl.zeros([BLOCK_IN, BLOCK_OUT], tl.float32)
    for at in tl.range(first, stop, BLOCK_ROWS, num_stages=STAGES):
        position = at + tl.arange(0, BLOCK_ROWS)
        live = position < stop
        pair = tl.load(order_ptr + position, mask=live, other=0)
        x_tile = (pair // PER_ROW)[None, :] * D_IN + i[:, None]
        x = tl.load(x_ptr + x_tile, mask=live[None, :] & i_inside[:, None], other=0.0)
        g_tile = pair[:, None] * D_OUT + o[None, :]
        g = tl.load(g_ptr + g_tile, mask=live[:, None] & o_inside[None, :], other=0.0)
        total = product(x, g, total)
    out = out_ptr + group.to(tl.int64) * (D_IN * D_OUT)
    out_tile = i[:, None] * D_OUT + o[None, :]
    mask = i_inside[:, None] & o_inside[None, :]
    tl.store(out + out_tile, total.to(out_ptr.dtype.element_ty), mask=mask)
