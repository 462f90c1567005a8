"""The slot arrays of one site, and what is kept of one slot: its own ranks only."""

from typing import NamedTuple

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


def tokens_per_row(x: Float[Array, "rows d_in"], routing: Routing) -> int:
    """Returns how many tokens in turn share a row of x: token t reads `x[t // this]`.

    1 in a dense layer; in a mixture of experts a token is one choice of a row.
    """
    return max(routing.slot.shape[0] // max(x.shape[0], 1), 1)


def kept_rows(site: Site, slot: Int32[Array, ""]) -> Bool[Array, "parts max_rank"]:
    """Returns which rank rows of one slot belong to its adapter."""
    row = jnp.arange(site.a.shape[2], dtype=jnp.int32)
    return row[None, :] < site.rank[slot][:, None]
