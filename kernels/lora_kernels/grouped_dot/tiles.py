"""Shapes and dtypes -> tile sizes of the Triton kernels. Pure, and decided only here.

The choice is made at trace time, so from static facts alone: it cannot see how pairs
are spread over groups. What depends on that is decided inside the kernels.
"""

from dataclasses import dataclass
from types import MappingProxyType

ALIGNED = 16
"""Rows of so many numbers start at addresses that wide loads need."""


@dataclass(frozen=True, kw_only=True)
class ProductTiles:
    """Tiles of one grouped product; the names are those of the kernel's constants.

    Attributes:
      block_rows: most pairs of one group that one program takes.
      block_k: columns of one step along the summed axis.
      block_n: columns of the output tile.
      even: tiles fit exactly, so no column needs a mask.
    """

    block_rows: int
    block_k: int
    block_n: int
    even: bool
    warps: int
    stages: int


@dataclass(frozen=True, kw_only=True)
class GradientTiles:
    """Tiles of the gradient of the kernels.

    Attributes:
      block_in: rows of the output tile, along `d_in`.
      block_out: columns of the output tile, along `d_out`.
      block_rows: pairs of one step along the summed axis.
    """

    block_in: int
    block_out: int
    block_rows: int
    warps: int
    stages: int


FEW, SOME, MANY = 16, 64, 128
"""Rows of a tile: the least of a tensor core, of a Hopper wgmma, and two of these."""

LEAST_SHARE = MappingProxyType({MANY: 256, SOME: 32})
"""Rows of a tile -> pairs of an even share from which on it is taken.

The last tile of a group is half empty on average. At the least share of MANY a fifth
of the products is lost to that; below 32 pairs, reading the kernels takes longest, and
the smallest tile reads them as fast as any.
"""

PRODUCT_BLOCKS = MappingProxyType(
    {FEW: (128, 64, 4), SOME: (64, 128, 4), MANY: (64, 128, 8)}
)
"""Rows of a tile -> `block_k`, `block_n` and warps of 16-bit products."""


def product_tiles(
    *, pairs: int, groups: int, summed: int, width: int, number_bytes: int
) -> ProductTiles:
    """Returns the tiles of a grouped product.

    Args:
      pairs: pairs of the batch.
      groups: groups over which they are spread.
      summed: length of the summed axis.
      width: columns of the output.
      number_bytes: bytes of one number in a product: 2 where both sides are of one
        16-bit dtype, else 4.
    """
    share = pairs // groups
    rows = next((rows for rows, least in LEAST_SHARE.items() if share >= least), FEW)
    if not _aligned(summed, width):
        # Loads go through registers, which bound the size of a tile.
        rows, block_k, block_n, warps = min(rows, SOME), 16, 64, 4
    elif number_bytes > 2:
        block_k, block_n, warps = 32, 64, 8 if rows == MANY else 4
    else:
        block_k, block_n, warps = PRODUCT_BLOCKS[rows]
    return ProductTiles(
        block_rows=rows,
        block_k=block_k,
        block_n=block_n,
        even=summed % block_k == 0 and width % block_n == 0,
        warps=warps,
        stages=3,
    )


def gradient_tiles(*, d_in: int, d_out: int, number_bytes: int) -> GradientTiles:
    """Returns the tiles of the gradient of the kernels; arguments as above."""
    narrow = number_bytes > 2 or not _aligned(d_in, d_out)
    return GradientTiles(
        block_in=64 if narrow else 128,
        block_out=64 if narrow else 128,
        block_rows=32,
        warps=4 if narrow else 8,
        stages=3,
    )


def _aligned(*lengths: int) -> bool:
    return all(length % ALIGNED == 0 for length in lengths)
