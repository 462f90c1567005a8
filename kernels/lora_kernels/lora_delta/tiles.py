"""Shapes, dtypes and the GPU -> tile sizes. Pure, and nothing else decides them.

The choice is made at trace time, so from static facts alone: it cannot see ranks, slots
in use or how rows are spread. What depends on those is decided inside the kernels.
"""

from dataclasses import dataclass

from lora_kernels.gpu_targets import Gpu

DECODE_TOKENS = 256
"""Up to so many rows one fused launch is taken, whatever the number of slots."""

BLOCK_RANK = 16
"""Smallest side of a tensor-core product. A decode row costs its rank, rounded up."""

SHRINK_BYTES = 32 << 20
"""Bytes of A that the programs of a fused launch may re-read from the L2 cache."""


def is_fused(*, tokens: int, slots: int) -> bool:
    """Returns whether shrink and expand are one launch.

    Its row tiles are small: A and B are read for every few rows of a slot, which is no
    more than once while rows are few, or slots are many (experts of several adapters).
    """
    return tokens <= max(DECODE_TOKENS, slots)


@dataclass(frozen=True)
class Problem:
    """The static facts of one call.

    Attributes:
      x_bytes: bytes of one number of x.
      weight_bytes: bytes of one number of the wider of a and b.
      mixed: whether x, y, a and b are of more than one dtype.
    """

    tokens: int
    slots: int
    max_rank: int
    d_in: int
    part_widths: tuple[int, ...]
    x_bytes: int
    weight_bytes: int
    mixed: bool

    @property
    def wide(self) -> bool:
        """Whether a product runs in 32 bit."""
        return max(self.x_bytes, self.weight_bytes) > 2

    @property
    def has_rank_blocks(self) -> bool:
        """Whether h of a row tile is more than one block of ranks."""
        return self.max_rank > BLOCK_RANK


@dataclass(frozen=True, kw_only=True)
class DecodeTiles:
    """Tiles of the fused kernel; the names are those of the kernel's constants.

    Attributes:
      programs: largest grid.
      spread: programs over which few items are spread.
      vector_rows: items of at most so many rows run on CUDA cores; 0 makes a row's bits
        independent of the other rows of its adapter.
      even: tiles fit exactly, so no column needs a mask.
      warps: also the number of pieces of the shrink's long axis.
    """

    programs: int
    spread: int
    vector_rows: int
    block_rows: int
    block_rank: int
    block_k: int
    vector_k: int
    block_n: int
    even: bool
    stages: int
    warps: int


def decode_tiles(problem: Problem, gpu: Gpu, *, vector_rows: int = 1) -> DecodeTiles:
    """Returns the tiles of the fused kernel.

    Args:
      problem: the static facts of the call.
      gpu: the GPU to build for.
      vector_rows: as in `DecodeTiles`.
    """
    warps = 8
    # The same bytes per step for 16 and 32 bit, so the same registers.
    block_k = 16 if problem.wide else 32
    vector_k = 128
    programs = 2 * gpu.num_sms
    part_bytes = problem.max_rank * problem.d_in * problem.weight_bytes
    affordable = SHRINK_BYTES // max(part_bytes, 1)
    block_n = _even_block_n(problem)
    even = problem.d_in % max(warps * block_k, vector_k) == 0 and all(
        width % block_n == 0 for width in problem.part_widths
    )
    return DecodeTiles(
        programs=programs,
        spread=max(min(programs, affordable), gpu.num_sms // 4, 1),
        vector_rows=vector_rows,
        block_rows=16,
        block_rank=BLOCK_RANK,
        block_k=block_k,
        vector_k=vector_k,
        block_n=block_n if even else _uneven_block_n(problem),
        even=even,
        stages=4 if even or problem.wide else 3,
        warps=warps,
    )


def _even_block_n(problem: Problem) -> int:
    # Columns of one output tile. Wide tiles mean few programs that repeat the shrink.
    # Conversions of a second dtype take registers, a few more than the assembler grants
    # unless the tile is so wide that it grants many, or narrow enough to do without.
    if problem.mixed:
        return 256 if problem.wide else 64
    widths = problem.part_widths
    fits = sum(widths) >= 4096 and all(width % 256 == 0 for width in widths)
    return 256 if fits and not problem.wide and not problem.has_rank_blocks else 128


def _uneven_block_n(problem: Problem) -> int:
    # Masks take registers, which bound the width of a tile. In 32 bit, where the shrink
    # takes more, the assembler trades a few for spilled ones unless tiles are wide.
    return 128 if problem.wide and not problem.has_rank_blocks else 64


@dataclass(frozen=True, kw_only=True)
class ShrinkTiles:
    """Tiles of the segment form's shrink.

    Attributes:
      k_split: columns of one split, a multiple of `block_k`.
      splits: partial sums of one row; each has at least one column.
    """

    block_rows: int
    block_rank: int
    block_k: int
    k_split: int
    splits: int
    even_k: bool
    warps: int
    stages: int


@dataclass(frozen=True, kw_only=True)
class ExpandTiles:
    """Tiles of the segment form's expand."""

    block_rows: int
    block_rank: int
    block_n: int
    even_n: bool
    warps: int
    stages: int


@dataclass(frozen=True, kw_only=True)
class GroupedTiles:
    """Tiles of the gradients of A and B."""

    block_rank: int
    block_rows: int
    block_n: int
    warps: int
    stages: int


SEGMENT_ROWS = 64
"""Rows of one tile of the segment form: the smallest that fills a Hopper wgmma."""

STEP_BYTES = 128
"""Bytes of a row that one step of the segment form's shrink takes."""

UNEVEN_BLOCK_K = 16
"""Columns of such a step where rows have a rest, or start unaligned."""

MOST_SPLITS = 8
"""Partial sums that expand adds for each number of h."""


def shrink_tiles(
    *, tokens: int, widths: tuple[int, ...], ranks: int, number_bytes: int, gpu: Gpu
) -> ShrinkTiles:
    """Returns the tiles of a shrink.

    Args:
      tokens: rows of x.
      widths: columns of each part's own columns of x, or of the one shared by all.
      ranks: most ranks that one such product has.
      number_bytes: bytes of one number of the wider side.
      gpu: the GPU to build for.
    """
    even = all(width * number_bytes % STEP_BYTES == 0 for width in widths)
    block_k = STEP_BYTES // number_bytes if even else UNEVEN_BLOCK_K
    wanted = most_splits(tokens=tokens, parts=len(widths), gpu=gpu)
    steps = -(-max(widths) // block_k)
    k_split = -(-steps // wanted) * block_k
    return ShrinkTiles(
        block_rows=SEGMENT_ROWS,
        block_rank=_block_rank(ranks, 64 if number_bytes <= 2 else 32),
        block_k=block_k,
        k_split=k_split,
        splits=-(-max(widths) // k_split),
        even_k=even,
        warps=4,
        stages=4,
    )


def most_splits(*, tokens: int, parts: int, gpu: Gpu) -> int:
    """Returns how many partial sums of a row `shrink_tiles` takes at most.

    Args:
      tokens: rows of x.
      parts: parts that have columns of their own.
      gpu: the GPU to build for.
    """
    programs = max(-(-tokens // SEGMENT_ROWS) * parts, 1)
    return min(max(2 * gpu.num_sms // programs, 1), MOST_SPLITS)


def expand_tiles(*, widths: tuple[int, ...], number_bytes: int) -> ExpandTiles:
    """Returns the tiles of an expand; arguments as in `shrink_tiles`, for y."""
    block_n = 128 if number_bytes <= 2 else 64
    return ExpandTiles(
        block_rows=SEGMENT_ROWS,
        block_rank=BLOCK_RANK,
        block_n=block_n,
        even_n=all(width % block_n == 0 for width in widths),
        warps=8,
        stages=2,
    )


def grouped_tiles(*, max_rank: int, number_bytes: int) -> GroupedTiles:
    """Returns the tiles of the gradient of A or B.

    Args:
      max_rank: rows of one part.
      number_bytes: bytes of one number of the summed rows.
    """
    return GroupedTiles(
        block_rank=_block_rank(max_rank, 64),
        block_rows=32,
        block_n=128 if number_bytes <= 2 else 64,
        warps=8,
        stages=3,
    )


def _block_rank(ranks: int, wide: int) -> int:
    # Ranks of one tensor-core product. Two choices keep what must be compiled small;
    # ranks beyond a slot's own are neither read nor written in either.
    return BLOCK_RANK if ranks <= BLOCK_RANK else wide
