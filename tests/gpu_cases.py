"""Calls that between them make `tiles` choose everything that it can choose."""

import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from lora_kernels.lora_delta import tiles

ALIKE = tuple((name, "", "") for name in ("bfloat16", "float16", "float32"))
"""Dtypes of x, y, and a and b."""

MIXED = (
    ("bfloat16", "bfloat16", "float32"),
    ("float32", "float32", "bfloat16"),
    ("bfloat16", "float32", "bfloat16"),
    ("float32", "bfloat16", "float32"),
)
"""Adapters or outputs that are not kept in the model's dtype."""


@dataclass(frozen=True)
class Case:
    """One call of `lora_delta`: shapes, and dtypes.

    Attributes:
      dtype: of x, and of the others unless they have their own.
      y_dtype, weight_dtype: of y, of a and b; "" is that of x.
    """

    name: str
    tokens: int
    max_rank: int
    d_in: int
    part_widths: tuple[int, ...]
    dtype: str
    y_dtype: str = ""
    weight_dtype: str = ""
    slots: int = 8

    @property
    def problem(self) -> tiles.Problem:
        return tiles.Problem(
            tokens=self.tokens,
            slots=self.slots,
            max_rank=self.max_rank,
            d_in=self.d_in,
            part_widths=self.part_widths,
            x_bytes=jnp.dtype(self.dtype).itemsize,
            weight_bytes=jnp.dtype(self.weight_dtype or self.dtype).itemsize,
            mixed=not {self.y_dtype, self.weight_dtype} <= {self.dtype, ""},
        )

    @property
    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Arguments of `lora_delta` and the slot of each row, as shapes."""
        parts, d_out = len(self.part_widths), sum(self.part_widths)
        weights = self.weight_dtype or self.dtype

        def shape(*sizes: int, dtype: str = self.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype)

        return {
            "x": shape(self.tokens, self.d_in),
            "y": shape(self.tokens, d_out, dtype=self.y_dtype or self.dtype),
            "a": shape(self.slots, parts, self.max_rank, self.d_in, dtype=weights),
            "b": shape(self.slots, self.max_rank, d_out, dtype=weights),
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
    "one-part": (4096, (4096,)),
}
"""Kinds of a site: `d_in` and the parts' widths."""

RANKS = {"one-block": 16, "blocks": 64}
"""Kinds of a rank axis: h of a row tile in registers, or not."""


def cases(
    tokens: int,
    sites: tuple[str, ...],
    dtypes: tuple[tuple[str, str, str], ...] = ALIKE,
) -> list[Case]:
    """Returns a case for every site, kind of rank axis and dtypes."""
    return [
        Case(
            f"{site}-{rank}-{'/'.join(filter(None, names))}",
            tokens,
            RANKS[rank],
            *SITES[site],
            *names,
        )
        for site, rank, names in itertools.product(sites, RANKS, dtypes)
    ]


DECODE = cases(32, ("wide", "wide-uneven", "narrow", "narrow-uneven", "unaligned"))
DECODE_MIXED = cases(32, ("wide", "narrow", "unaligned"), MIXED)


def prefill(dtypes: tuple[tuple[str, str, str], ...]) -> list[Case]:
    """Returns a case for every choice of the segment form."""
    one_block = [
        case for case in cases(600, ("one-part",), dtypes) if case.max_rank == 16
    ]
    return cases(600, ("wide", "unaligned"), dtypes) + one_block


PREFILL = prefill(ALIKE)
PREFILL_MIXED = prefill(MIXED[:2])


def essence(chosen: tiles.DecodeTiles) -> tiles.DecodeTiles:
    """The part of a choice that changes the code of the kernel, not just a bound."""
    return replace(chosen, programs=0, spread=0)
