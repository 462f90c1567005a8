"""Calls that between them make `grouped_dot.tiles` choose all that it can choose."""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lora_kernels.grouped_dot import tiles


@dataclass(frozen=True)
class Case:
    """One call of `grouped_dot`: shapes and the dtype of x and kernel."""

    name: str
    tokens: int
    chosen: int
    groups: int
    d_in: int
    d_out: int
    dtype: str

    @property
    def number_bytes(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Arguments of `grouped_dot`, its cotangent, and the group of each pair."""
        pairs = self.tokens * self.chosen

        def shape(*sizes: int, dtype: str = self.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype)

        return {
            "x": shape(self.tokens, self.d_in),
            "kernel": shape(self.groups, self.d_in, self.d_out),
            "g": shape(pairs, self.d_out),
            "group": shape(pairs, dtype="int32"),
        }


BATCHES = {"few": (16, 8, 64), "some": (512, 8, 64), "many": (4096, 4, 64)}
"""Kinds of a batch: tokens, pairs of each, groups."""

SHAPES = {
    "even": (2048, 2816),
    "masked": (2880, 2896),
    "unaligned": (577, 2049),
    # One axis of rows that start where wide loads cannot.
    "half-aligned": (1024, 513),
}
"""Kinds of a kernel: `d_in` and `d_out`."""

DTYPES = ("bfloat16", "float32")

CASES = [
    Case(f"{batch}-{shape}-{dtype}", *BATCHES[batch], *SHAPES[shape], dtype)
    for batch, shape, dtype in itertools.product(BATCHES, SHAPES, DTYPES)
] + [
    Case(f"{batch}-even-float16", *BATCHES[batch], *SHAPES["even"], "float16")
    for batch in BATCHES
]


def products(case: Case) -> list[tuple[tiles.ProductTiles, bool, int]]:
    """Tiles of the product and of its gradient, and what else the code depends on."""
    aligned = case.d_in % tiles.ALIGNED == 0 and case.d_out % tiles.ALIGNED == 0
    return [
        (
            tiles.product_tiles(
                pairs=case.tokens * case.chosen,
                groups=case.groups,
                summed=summed,
                width=width,
                number_bytes=case.number_bytes,
            ),
            aligned,
            case.number_bytes,
        )
        for summed, width in [(case.d_in, case.d_out), (case.d_out, case.d_in)]
    ]
