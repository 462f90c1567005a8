"""The slot arrays of one site, and what is kept of one slot: its own ranks only."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from lora_kernels.routing import Routing


class Site(NamedTuple):
    """The slot arrays of one site.

    Attributes:
      a, b, scale, rank: as in `api.lora_delta`.
      part_widths: output columns of each part (static).
    """

    a: Float[Array, "slots parts max_rank d_in"]
    b: Float[Array, "slots max_rank d_out"]
    scale: Float[Array, "slots parts"]
    rank: Int32[Array, "slots parts"]
    part_widths: tuple[int, ...]

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """First and one past the last output column of each part."""
        stops = np.cumsum(self.part_widths).tolist()
        return tuple(zip([0, *stops[:-1]], stops, strict=True))

    @property
    def part_of_column(self) -> np.ndarray:
        """Part that owns each output column, `(d_out,)`."""
        return np.repeat(np.arange(len(self.part_widths)), self.part_widths)


def wide_dtype(*arrays: Array) -> jnp.dtype:
    """Returns the dtype to accumulate in: float32, or float64 if any array has it."""
    return jnp.promote_types(jnp.float32, jnp.result_type(*arrays))


def tokens_per_row(x: Float[Array, "rows d_in"], routing: Routing) -> int:
    """Returns how many tokens in turn share a row of x: token t reads `x[t // this]`.

    1 in a dense layer; in a mixture of experts a token is one choice of a row.
    """
    return max(routing.slot.shape[0] // max(x.shape[0], 1), 1)


def kept_rows(site: Site, slot: Int32[Array, ""]) -> Bool[Array, "parts max_rank"]:
    """Returns which rank rows of one slot belong to its adapter."""
    row = jnp.arange(site.a.shape[2], dtype=jnp.int32)
    return row[None, :] < site.rank[slot][:, None]


def a_of_slot(
    site: Site, slot: Int32[Array, ""], dtype: jnp.dtype
) -> Float[Array, "parts max_rank d_in"]:
    """Returns one slot's A, rank tails as they are: no sum meets them."""
    return jax.lax.dynamic_index_in_dim(site.a, slot, keepdims=False).astype(dtype)


def b_of_slot(
    site: Site, slot: Int32[Array, ""], dtype: jnp.dtype
) -> list[Float[Array, "max_rank _"]]:
    """Returns one slot's B cut into parts, zeros in the rank tails."""
    kept = kept_rows(site, slot)
    max_rank = site.b.shape[1]
    cut = [
        jax.lax.dynamic_slice(site.b, (slot, 0, first), (1, max_rank, stop - first))[0]
        for first, stop in site.columns
    ]
    return [
        jnp.where(kept[part][:, None], b.astype(dtype), 0) for part, b in enumerate(cut)
    ]
