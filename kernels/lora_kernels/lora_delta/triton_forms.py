"""Arrays and tiles -> the launches of the Triton kernels. Computes nothing itself."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lora_kernels.gpu_targets import current_gpu
from lora_kernels.lora_delta import tiles
from lora_kernels.lora_delta.site import tokens_per_row
from lora_kernels.lora_delta.triton_decode import decode_kernel
from lora_kernels.lora_delta.triton_grouped import grouped_kernel
from lora_kernels.lora_delta.triton_segment import expand_kernel, shrink_kernel
from lora_kernels.routing import Routing, max_work_items, work_list
from lora_kernels.triton_launch import Launch


@dataclass(frozen=True)
class Call:
    """One site's slot arrays and one batch's routing, as a kernel takes them."""

    a: Float[Array, "slots parts max_rank d_in"]
    b: Float[Array, "slots max_rank d_out"]
    scale: Float[Array, "slots parts"]
    rank: Int32[Array, "slots parts"]
    part_widths: tuple[int, ...]
    routing: Routing

    @property
    def parts(self) -> int:
        """Number of parts (static)."""
        return self.a.shape[1]

    @property
    def max_rank(self) -> int:
        """Rows of one part in a and b (static)."""
        return self.a.shape[2]


def row_tiles(routing: Routing, block: int) -> tuple[Array, ...]:
    """Returns order and work list of tiles of `block` rows, as a kernel takes them."""
    if block == routing.block:
        items = (
            routing.work_slot,
            routing.work_start,
            routing.work_stop,
            routing.work_count,
        )
    else:
        length = max_work_items(routing.slot.shape[0], routing.num_slots, block)
        items = work_list(routing.starts, length, block)
    return (routing.order, *items)


def single_rows(routing: Routing) -> tuple[Array, ...]:
    """Returns what `row_tiles` does, with every row an item; that of a base row has the
    slot after the last one.

    Nothing is sorted or counted, so that routing costs hardly a launch.
    """
    row = jnp.arange(routing.slot.shape[0], dtype=jnp.int32)
    slot = jnp.where(routing.slot >= 0, routing.slot, routing.num_slots)
    return row, slot, row, row + 1, jnp.int32(row.shape[0])


def decode_launch(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    call: Call,
    *,
    vector_rows: int,
) -> Launch:
    """Returns the fused launch; its first output is the new y, in y's memory."""
    problem = tiles.Problem(
        tokens=y.shape[0],
        slots=call.a.shape[0],
        max_rank=call.max_rank,
        d_in=x.shape[1],
        part_widths=call.part_widths,
        x_bytes=x.dtype.itemsize,
        weight_bytes=max(call.a.dtype.itemsize, call.b.dtype.itemsize),
        mixed=len({array.dtype for array in (x, y, call.a, call.b)}) > 1,
    )
    chosen = tiles.decode_tiles(problem, current_gpu(), vector_rows=vector_rows)
    if call.routing.block == 1:
        items = single_rows(call.routing)
        rank = jnp.pad(call.rank, ((0, 1), (0, 0)))  # a slot that has nothing to do
    else:
        rank = call.rank
        items = row_tiles(call.routing, chosen.block_rows)
    column_tiles = sum(-(-width // chosen.block_n) for width in call.part_widths)
    programs = min(items[1].shape[0] * column_tiles, chosen.programs)
    outputs: tuple[jax.ShapeDtypeStruct, ...] = (_like(y),)
    constants = {
        "TOKENS_PER_ROW": tokens_per_row(x, call.routing),
        "D_IN": x.shape[1],
        "D_OUT": y.shape[1],
        "WIDTHS": call.part_widths,
        "MAX_RANK": call.max_rank,
        "SPREAD": chosen.spread,
        "VECTOR_ROWS": chosen.vector_rows,
        "BLOCK_ROWS": chosen.block_rows,
        "BLOCK_RANK": chosen.block_rank,
        "K_GROUPS": chosen.warps,
        "BLOCK_K": chosen.block_k,
        "VECTOR_K": chosen.vector_k,
        "BLOCK_N": chosen.block_n,
        "EVEN_K": chosen.even,
        "EVEN_N": chosen.even,
        "STAGES": chosen.stages,
    }
    if call.max_rank <= chosen.block_rank:
        constants["h_ptr"] = None
    else:
        shape = (programs, chosen.block_rows, call.max_rank)
        outputs = (*outputs, jax.ShapeDtypeStruct(shape, jnp.float32))
    return Launch(
        kernel=decode_kernel,
        inputs=(
            x,
            y,
            call.a,
            call.b,
            call.scale,
            rank,
            call.routing.weight,
            *items,
        ),
        outputs=outputs,
        aliases={1: 0},
        grid=(programs,),
        constants=constants,
        warps=chosen.warps,
        stages=chosen.stages,
    )


def shrink_launch(x: Float[Array, "rows d"], w: Array, call: Call) -> Launch:
    """Returns the launch of `h = x @ w.T`, w being the site's a or b.

    Its output is `(splits, tokens, parts * max_rank)` in the sorted order of the rows;
    what belongs to base rows or lies behind a part's rank is not written.
    """
    shared = w.ndim == 4
    widths = (x.shape[1],) if shared else call.part_widths
    tokens = call.routing.slot.shape[0]
    chosen = tiles.shrink_tiles(
        tokens=tokens,
        widths=widths,
        ranks=call.parts * call.max_rank if shared else call.max_rank,
        number_bytes=max(x.dtype.itemsize, w.dtype.itemsize),
        gpu=current_gpu(),
    )
    order, *items = row_tiles(call.routing, chosen.block_rows)
    shape = (chosen.splits, tokens, call.parts * call.max_rank)
    return Launch(
        kernel=shrink_kernel,
        inputs=(x, w, call.rank, order, *items),
        outputs=(jax.ShapeDtypeStruct(shape, jnp.float32),),
        aliases={},
        grid=(items[0].shape[0], chosen.splits, len(widths)),
        constants={
            "TOKENS": tokens,
            "TOKENS_PER_ROW": tokens_per_row(x, call.routing),
            "X_STRIDE": x.shape[1],
            "WIDTHS": widths,
            "SLOT_STRIDE": w.size // w.shape[0],
            "PARTS": call.parts,
            "MAX_RANK": call.max_rank,
            "SHARED": shared,
            "BLOCK_ROWS": chosen.block_rows,
            "BLOCK_RANK": chosen.block_rank,
            "BLOCK_K": chosen.block_k,
            "K_SPLIT": chosen.k_split,
            "EVEN_K": chosen.even_k,
            "STAGES": chosen.stages,
        },
        warps=chosen.warps,
        stages=chosen.stages,
    )


def expand_launch(
    h: Float[Array, "splits tokens ranks"],
    y: Float[Array, "tokens d"],
    w: Array,
    call: Call,
) -> Launch:
    """Returns the launch of `y + (h * scale * weight) @ w`, w being the site's b or a.

    Its output is the new y, in y's memory.
    """
    shared = w.ndim == 4
    widths = (y.shape[1],) if shared else call.part_widths
    chosen = tiles.expand_tiles(widths=widths, number_bytes=w.dtype.itemsize)
    order, *items = row_tiles(call.routing, chosen.block_rows)
    column_tiles = sum(-(-width // chosen.block_n) for width in widths)
    return Launch(
        kernel=expand_kernel,
        inputs=(
            h,
            y,
            w,
            call.scale,
            call.rank,
            call.routing.weight,
            order,
            *items,
        ),
        outputs=(_like(y),),
        aliases={1: 0},
        grid=(column_tiles, items[0].shape[0]),
        constants={
            "TOKENS": y.shape[0],
            "SPLITS": h.shape[0],
            "Y_STRIDE": y.shape[1],
            "WIDTHS": widths,
            "SLOT_STRIDE": w.size // w.shape[0],
            "PARTS": call.parts,
            "MAX_RANK": call.max_rank,
            "SHARED": shared,
            "BLOCK_ROWS": chosen.block_rows,
            "BLOCK_RANK": chosen.block_rank,
            "BLOCK_N": chosen.block_n,
            "EVEN_N": chosen.even_n,
        },
        warps=chosen.warps,
        stages=chosen.stages,
    )


def grouped_launch(
    h: Float[Array, "splits tokens ranks"],
    v: Float[Array, "rows d"],
    w: Array,
    call: Call,
) -> Launch:
    """Returns the launch of w's gradient, `(h * scale * weight).T @ v` slot by slot."""
    shared = w.ndim == 4
    chosen = tiles.grouped_tiles(max_rank=call.max_rank, number_bytes=v.dtype.itemsize)
    widest = v.shape[1] if shared else max(call.part_widths)
    column_tiles = -(-widest // chosen.block_n)
    return Launch(
        kernel=grouped_kernel,
        inputs=(
            h,
            v,
            call.scale,
            call.rank,
            call.routing.weight,
            call.routing.order,
            call.routing.starts,
        ),
        outputs=(_like(w),),
        aliases={},
        grid=(
            w.shape[0] * column_tiles,
            call.parts * -(-call.max_rank // chosen.block_rank),
        ),
        constants={
            "TOKENS": h.shape[1],
            "TOKENS_PER_ROW": tokens_per_row(v, call.routing),
            "SPLITS": h.shape[0],
            "V_STRIDE": v.shape[1],
            "WIDTHS": call.part_widths,
            "PARTS": call.parts,
            "MAX_RANK": call.max_rank,
            "SHARED": shared,
            "BLOCK_RANK": chosen.block_rank,
            "BLOCK_ROWS": chosen.block_rows,
            "BLOCK_N": chosen.block_n,
            "COLUMN_TILES": column_tiles,
            "STAGES": chosen.stages,
        },
        warps=chosen.warps,
        stages=chosen.stages,
    )


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
