"""Shrink and expand in Pallas on Mosaic GPU: TMA copies and wgmma, Hopper.

A program takes one work item, so one adapter, whose index it reads from memory; A and B
are copied straight out of the slot arrays, 16 rank rows at a time and none behind the
slot's own rank. Operands lie as wgmma wants them, so nothing is transposed on the way:
rows are the narrow side of the shrink (16 at decode, as its wide side is 64 at least)
and the wide side of the expand.
"""
# Conditions and loops of a kernel are functions inside it.
# ruff: noqa: C901

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

M = 64
"""Rows of the left side of a wgmma."""

PIECE = 16
"""Rank rows that are copied at a time."""

BLOCK_K = 64
"""Columns of a step of the shrink."""

BUFFERS = 4
"""Steps of the shrink that are in flight."""


def shrink(
    x: BFloat16[Array, "items d_in rows"],
    a: BFloat16[Array, "slots parts max_rank d_in"],
    item_slot: Int32[Array, " items"],
    rank: Int32[Array, "slots parts"],
) -> Float32[Array, "items parts max_rank rows"]:
    """Returns `a @ x` of every item that has a slot; what is left out is garbage.

    Written are the ranks up to the slot's own, rounded up to `PIECE`.
    """
    items, d_in, rows = x.shape
    parts, max_rank = a.shape[1:3]
    steps = d_in // BLOCK_K

    def body(x_gmem, a_gmem, slot_gmem, rank_gmem, h_gmem, a_smem, x_smem, h_smem, bar):
        item, part = jax.lax.axis_index("item"), jax.lax.axis_index("part")
        first = jax.lax.axis_index("piece") * PIECE
        slot = slot_gmem[item]

        @pl.when(slot >= 0)
        def _of_item():
            @pl.when(first < rank_gmem[jnp.maximum(slot, 0), part])
            def _of_piece():
                ranks = pl.ds(first, PIECE)

                def copy(step, buffer):
                    columns = pl.ds(step * BLOCK_K, BLOCK_K)
                    plgpu.copy_gmem_to_smem(
                        a_gmem.at[slot, part, ranks, columns],
                        a_smem.at[buffer, pl.ds(0, PIECE)],  # rows below: garbage
                        bar.at[buffer],
                    )
                    plgpu.copy_gmem_to_smem(
                        x_gmem.at[item, columns], x_smem.at[buffer], bar.at[buffer]
                    )

                for step in range(min(BUFFERS, steps)):
                    copy(step, step)

                def product(total):
                    def add(step, carry):
                        buffer = jax.lax.rem(step, BUFFERS)
                        plgpu.barrier_wait(bar.at[buffer])
                        plgpu.wgmma(total, a_smem.at[buffer], x_smem.at[buffer])
                        plgpu.wgmma_wait(0)

                        @pl.when(step + BUFFERS < steps)
                        def _refill():
                            copy(step + BUFFERS, buffer)

                        return carry

                    jax.lax.fori_loop(0, steps, add, 0)
                    return total[...]

                h_smem[...] = pl.run_scoped(
                    product, plgpu.WGMMAAccumulatorRef((M, rows))
                )
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    h_smem.at[pl.ds(0, PIECE)], h_gmem.at[item, part, ranks]
                )
                plgpu.wait_smem_to_gmem(0)

    # Both sides of a wgmma have one swizzle; that of x is as wide as its rows.
    swizzle = _swizzle(2 * rows)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((items, parts, max_rank, rows), jnp.float32),
        grid=(items, parts, max_rank // PIECE),
        grid_names=("item", "part", "piece"),
        scratch_types=(
            plgpu.SMEM((BUFFERS, M, BLOCK_K), x.dtype, transforms=swizzle),
            plgpu.SMEM((BUFFERS, BLOCK_K, rows), x.dtype, transforms=swizzle),
            plgpu.SMEM((M, rows), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=BUFFERS),
        ),
    )(x, a, item_slot, rank)


def expand(
    high: BFloat16[Array, "items parts row_tile rank_tiles"],
    low: BFloat16[Array, "items parts row_tile rank_tiles"],
    b: BFloat16[Array, "slots max_rank d_out"],
    item_slot: Int32[Array, " items"],
    rank: Int32[Array, "slots parts"],
    part_of_tile: Int32[Array, " tiles"],
    *,
    rows: int,
) -> Float32[Array, "items {rows} d_out"]:
    """Returns `(high + low) @ b` of every item that has a slot; the rest is garbage.

    Args:
      high, low: the two halves of h: zero behind a part's rank, and in rows that do not
        exist; `row_tile` is M and `rank_tiles` a multiple of it.
      part_of_tile: part of each column tile.
      rows: rows of an item that are written.
    """
    items, rank_tiles = high.shape[0], high.shape[3]
    max_rank, d_out = b.shape[1:]
    block_n = d_out // part_of_tile.shape[0]
    pieces = [first for first in range(0, M, PIECE) if first < max_rank]

    def body(
        high_gmem, low_gmem, b_gmem, slot_gmem, rank_gmem, part_gmem, out_gmem,
        high_smem, low_smem, b_smem, out_smem, h_bar, b_bar,
    ):  # fmt: skip
        item, tile = jax.lax.axis_index("item"), jax.lax.axis_index("tile")
        slot, part = slot_gmem[item], part_gmem[tile]

        @pl.when(slot >= 0)
        def _of_item():
            own_rank = rank_gmem[jnp.maximum(slot, 0), part]
            columns = pl.ds(tile * block_n, block_n)

            def product(total):
                for first in range(0, rank_tiles, M):

                    @pl.when(first < own_rank)
                    def _of_ranks(first=first):
                        for h_gmem, h_smem in (
                            (high_gmem, high_smem),
                            (low_gmem, low_smem),
                        ):
                            plgpu.copy_gmem_to_smem(
                                h_gmem.at[item, part, :, pl.ds(first, M)], h_smem, h_bar
                            )

                        def if_kept(piece, action):
                            @pl.when(first + piece < own_rank)
                            def _():
                                action(piece)

                        def copy(piece):
                            plgpu.copy_gmem_to_smem(
                                b_gmem.at[slot, pl.ds(first + piece, PIECE), columns],
                                b_smem.at[pl.ds(piece, PIECE)],
                                b_bar.at[piece // PIECE],
                            )

                        def wait(piece):
                            plgpu.barrier_wait(b_bar.at[piece // PIECE])

                        for piece in pieces:
                            if first + piece < max_rank:
                                if_kept(piece, copy)
                        for piece in pieces:
                            if first + piece < max_rank:
                                if_kept(piece, wait)
                        # 0 * NaN is NaN: what lies behind the rank must not stay.
                        row = plgpu.broadcasted_iota(
                            jnp.int32, (M, block_n), 0, layout=plgpu.Layout.WGMMA
                        )
                        kept = row < own_rank - first
                        b_smem[...] = jnp.where(
                            kept, b_smem[...], jnp.zeros((M, block_n), b_smem.dtype)
                        )
                        plgpu.commit_smem()
                        plgpu.barrier_wait(h_bar)
                        plgpu.wgmma(total, high_smem, b_smem)
                        plgpu.wgmma(total, low_smem, b_smem)
                        plgpu.wgmma_wait(0)

                return total[...]

            out_smem[...] = pl.run_scoped(
                product, plgpu.WGMMAAccumulatorRef((M, block_n))
            )
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                out_smem.at[pl.ds(0, rows)], out_gmem.at[item, :, columns]
            )
            plgpu.wait_smem_to_gmem(0)

    swizzle = _swizzle(128)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((items, rows, d_out), jnp.float32),
        grid=(items, part_of_tile.shape[0]),
        grid_names=("item", "tile"),
        scratch_types=(
            plgpu.SMEM((M, M), high.dtype, transforms=swizzle),
            plgpu.SMEM((M, M), high.dtype, transforms=swizzle),
            plgpu.SMEM((M, block_n), b.dtype, transforms=swizzle),
            plgpu.SMEM((M, block_n), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=1, num_barriers=len(pieces)),
        ),
    )(high, low, b, item_slot, rank, part_of_tile)


def _swizzle(row_bytes: int) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    # Of numbers of two bytes.
    swizzle = min(row_bytes, 128)
    tiling = plgpu.TilingTransform((8, swizzle // 2))
    return tiling, plgpu.SwizzleTransform(swizzle)
