"""Calls that between them make `tiles` choose everything that it can choose."""

import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from lora_kernels.lora_delta import tiles

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Case:
    """One call of `lora_delta`: shapes and the dtype of x, y, a and b."""

    name: str
    tokens: int
    max_rank: int
    d_in: int
    part_widths: tuple[int, ...]
    dtype: str
    slots: int = 8

    @property
    def problem(self) -> tiles.Problem:
        width = jnp.dtype(self.dtype).itemsize
        return tiles.Problem(
            tokens=self.tokens,
            slots=self.slots,
            max_rank=self.max_rank,
            d_in=self.d_in,
            part_widths=self.part_widths,
            x_bytes=width,
            weight_bytes=width,
        )

    @property
    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Arguments of `lora_delta` and the slot of each row, as shapes."""
        parts, d_out = len(self.part_widths), sum(self.part_widths)

        def shape(*sizes: int, dtype: str = self.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype)

        return {
            "x": shape(self.tokens, self.d_in),
            "y": shape(self.tokens, d_out),
            "a": shape(self.slots, parts, self.max_rank, self.d_in),
            "b": shape(self.slots, self.max_rank, d_out),
            "scale": shape(self.slots, parts, dtype="float32"),
            "rank": shape(self.slots, parts, dtype="int32"),
            "slot": shape(self.tokens, dtype="int32"),
        }


SITES = {
    "wide": (4096, (4096, 1024, 1024)),
    "wide-uneven": (4096 + 16, (4096,)),
    "narrow": (2048, (512, 512)),
    "narrow-uneven": (576, (576, 192, 192)),
    "unaligned": (577, (2049,)),
}
"""Kinds of a site: `d_in` and the parts' widths."""

RANKS = {"one-block": 16, "blocks": 64}
"""Kinds of a rank axis: h of a row tile in registers, or not."""


def cases(tokens: int, sites: tuple[str, ...]) -> list[Case]:
    """Returns a case for every site, kind of rank axis and dtype."""
    return [
        Case(f"{site}-{rank}-{dtype}", tokens, RANKS[rank], *SITES[site], dtype)
        for site, rank, dtype in itertools.product(sites, RANKS, DTYPES)
    ]


DECODE = cases(32, tuple(SITES))
PREFILL = cases(600, ("wide", "unaligned"))


def essence(chosen: tiles.DecodeTiles) -> tiles.DecodeTiles:
    """The part of a choice that changes the code of the kernel, not just a bound."""
    return replace(chosen, programs=0, spread=0)
