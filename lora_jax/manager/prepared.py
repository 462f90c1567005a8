"""An adapter made ready for one model, before it takes anybody's place.

Preparing reads no table and writes none, so it may run on any thread; whatever is wrong
with an adapter comes out here, while nothing has changed.
"""

from dataclasses import dataclass, field

import jax
import numpy as np

from lora_jax.adapters import Adapter
from lora_jax.packing import Packed


@dataclass(frozen=True, eq=False)
class Prepared:
    """An adapter with its host copy in the bank's layout.

    Attributes:
      adapter: as loaded.
      packed: the host copy, at the adapter's own ranks.
      staged: dtype name -> flat buffer already on its way to the device, for the first
        activation; None: staged when it is activated.
    """

    adapter: Adapter
    packed: Packed = field(repr=False)
    staged: dict[str, jax.Array] | dict[str, np.ndarray] | None = field(
        default=None, repr=False
    )
