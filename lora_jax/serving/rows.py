"""The facts of a step's rows, packed into two small arrays: one transfer each.

Host code fills a `RowFacts` for each row; inside jit a `StepRows` gives them back as
named arrays. Values only: no option, slot or position ever changes a shape.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float, Int

from lora_jax.serving.requests import GREEDY, SamplingParams
from lora_jax.serving.sampling import HostOrDevice, SamplingRows
from lora_jax.shapes import BASE_SLOT

NO_POSITION = -1
"""Position of a row that does nothing in this step."""


@dataclasses.dataclass(frozen=True)
class RowFacts:
    """One row of a step.

    Attributes:
      row: its row of the batch; one outside the batch is dropped.
      position: prefill: position of the last prompt token; decode: position of the
        token that is fed; `NO_POSITION` for an idle row.
      slot: bank slot of its adapter, `BASE_SLOT` for none.
      start: first position on which the adapter acts (0, but for an activated LoRA).
      step: index of the token that is drawn within its request.
      sampling: how it is drawn.
    """

    row: int
    position: int = NO_POSITION
    slot: int = BASE_SLOT
    start: int = 0
    step: int = 0
    sampling: SamplingParams = GREEDY


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepRows:
    """`RowFacts` of all rows of a step, as arrays.

    Attributes:
      integers: int32; row, position, slot, start, step, top_k, seed (its 32 bits).
      reals: float32; temperature, top_p.
    """

    integers: Int[HostOrDevice, "7 rows"]
    reals: Float[HostOrDevice, "2 rows"]

    @property
    def row(self) -> Int[HostOrDevice, " rows"]:
        """Row of the batch."""
        return self.integers[0]

    @property
    def position(self) -> Int[HostOrDevice, " rows"]:
        """Position of the row's last token; negative for an idle row."""
        return self.integers[1]

    @property
    def slot(self) -> Int[HostOrDevice, " rows"]:
        """Bank slot, `BASE_SLOT` for base and idle rows."""
        return self.integers[2]

    @property
    def start(self) -> Int[HostOrDevice, " rows"]:
        """First position on which the row's adapter acts."""
        return self.integers[3]

    @property
    def sampling(self) -> SamplingRows:
        """Options of the draw."""
        _, _, _, _, step, top_k, seed = self.integers
        temperature, top_p = self.reals
        return SamplingRows(temperature, top_p, top_k, seed, step)


def pack_rows(facts: Sequence[RowFacts]) -> StepRows:
    """Returns the rows' facts as two host arrays."""
    integers = [
        (f.row, f.position, f.slot, f.start, f.step, f.sampling.top_k, f.sampling.seed)
        for f in facts
    ]
    reals = [(f.sampling.temperature, f.sampling.top_p) for f in facts]
    # int64 first: a seed above 2**31 keeps its 32 bits, as a negative int32.
    packed = np.asarray(integers, np.int64).T.astype(np.uint32).view(np.int32)
    return StepRows(packed, np.asarray(reals, np.float32).T)
