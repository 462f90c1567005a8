"""The fused decode kernel: shrink and expand of one site in one launch.

A program takes a row tile (one work item: up to BLOCK_ROWS rows of one slot) and a run
of output tiles. It computes the low-rank intermediate h of the rows, then adds into its
output tiles. Programs of the same item repeat the shrink; their A comes from L2.

    output tiles of one item      [ q: 0 1 2 3 4 5 | k: 6 7 | v: 8 9 ]
    cut into runs of 3              ^^^^^  ^^^^^     ^^^^^^^^^^     ^
    unit u                          item u // runs, run u % runs

The number of runs is chosen while running: few items are spread over many programs for
latency, many items are not cut, so that no A is read twice. Base rows make no items,
and a part of rank 0 makes no work.

Parts are worked off one after another, and each reads its rows of x again, from the L2
cache: a tile of h for all parts at once would take registers in proportion to them. In
the segment form they share such reads.
"""

from typing import no_type_check

import triton
import triton.language as tl

from lora_kernels.lora_delta.triton_math import part_columns, part_tiles
from lora_kernels.lora_delta.triton_rows import add_delta


@triton.jit
@no_type_check
def decode_kernel(
    x_ptr,  # (tokens / TOKENS_PER_ROW, D_IN)
    y_ptr,  # (tokens, D_OUT): the buffer of out_ptr, through which it is read
    a_ptr,  # (slots, parts, MAX_RANK, D_IN)
    b_ptr,  # (slots, MAX_RANK, D_OUT)
    scale_ptr,  # float32 (slots, parts)
    rank_ptr,  # int32 (slots, parts), and one row more if items may have no slot
    weight_ptr,  # float32 (tokens,)
    order_ptr,  # int32 (tokens,)
    item_slot_ptr,  # int32 (items,)
    item_start_ptr,  # int32 (items,)
    item_stop_ptr,  # int32 (items,)
    item_count_ptr,  # int32 ()
    out_ptr,  # (tokens, D_OUT)
    h_ptr,  # float32 (programs, BLOCK_ROWS, MAX_RANK); unused if BLOCK_RANK >= MAX_RANK
    TOKENS_PER_ROW: tl.constexpr,  # tokens in turn that share a row of x
    D_IN: tl.constexpr,
    D_OUT: tl.constexpr,
    WIDTHS: tl.constexpr,  # output columns of each part
    MAX_RANK: tl.constexpr,
    SPREAD: tl.constexpr,  # programs over which few items are spread
    VECTOR_ROWS: tl.constexpr,  # items of at most so many rows run on CUDA cores
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    K_GROUPS: tl.constexpr,  # warps that share the long axis of the shrink
    BLOCK_K: tl.constexpr,  # columns of one such warp's step
    VECTOR_K: tl.constexpr,  # columns of a step on CUDA cores
    BLOCK_N: tl.constexpr,
    EVEN_K: tl.constexpr,  # K_GROUPS * BLOCK_K and VECTOR_K divide D_IN
    EVEN_N: tl.constexpr,  # BLOCK_N divides every part's width
    STAGES: tl.constexpr,
):
    PARTS: tl.constexpr = len(WIDTHS)
    last_first, last_count = part_tiles(PARTS - 1, WIDTHS, BLOCK_N)
    tiles = last_first + last_count
    items = tl.load(item_count_ptr)
    runs = tl.minimum(tl.maximum(SPREAD // tl.maximum(items, 1), 1), tiles)
    run_tiles = tl.cdiv(tiles, runs)
    runs = tl.cdiv(tiles, run_tiles)
    if BLOCK_RANK < MAX_RANK:
        h_ptr += tl.program_id(0) * (BLOCK_ROWS * MAX_RANK)
    for unit in range(tl.program_id(0), items * runs, tl.num_programs(0)):
        item = unit // runs
        run_first = (unit % runs) * run_tiles
        run_stop = tl.minimum(run_first + run_tiles, tiles)
        slot = tl.load(item_slot_ptr + item).to(tl.int64)
        row_first = tl.load(item_start_ptr + item)
        rows = tl.load(item_stop_ptr + item) - row_first
        row = tl.arange(0, BLOCK_ROWS)
        tokens = tl.load(order_ptr + row_first + row, mask=row < rows, other=0)
        weight = tl.load(weight_ptr + tokens, mask=row < rows, other=0.0)
        for part in range(PARTS):
            # The run's tiles in this part, counted from the part's first tile.
            part_first, part_count = part_tiles(part, WIDTHS, BLOCK_N)
            first = tl.maximum(run_first - part_first, 0)
            stop = tl.minimum(run_stop - part_first, part_count)
            rank = tl.load(rank_ptr + slot * PARTS + part)
            if first < stop and rank > 0:
                rank = tl.minimum(rank, MAX_RANK)
                column, width = part_columns(part, WIDTHS)
                scale = tl.load(scale_ptr + slot * PARTS + part)
                add_delta(
                    x_ptr,
                    tokens,
                    rows,
                    a_ptr + (slot * PARTS + part) * (MAX_RANK * D_IN),
                    b_ptr + slot * (MAX_RANK * D_OUT) + column,
                    scale * weight,
                    rank,
                    out_ptr + column,
                    width,
                    first,
                    stop,
                    h_ptr,
                    TOKENS_PER_ROW,
                    D_IN,
                    D_OUT,
                    MAX_RANK,
                    VECTOR_ROWS,
                    BLOCK_ROWS,
                    BLOCK_RANK,
                    K_GROUPS,
                    BLOCK_K,
                    VECTOR_K,
                    BLOCK_N,
                    EVEN_K,
                    EVEN_N,
                    STAGES,
                )
