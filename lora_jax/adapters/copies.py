"""Copies of base layers that an adapter's file carries: kept as a sample, to compare.

PEFT writes the whole base weight of an embedding or head beside its LoRA pair. The copy
changes nothing if it is the served base's; if it is not, the adapter was trained on
another base (or on a resized vocabulary) and must not be served as if nothing were.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

ROWS = 256
"""Rows kept of each copy, evenly spread, the last among them."""


@runtime_checkable
class Weight(Protocol):
    """An array of NumPy or JAX."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: Any, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class BaseCopy:
    """Rows of a base layer's weight as the file has it.

    Attributes:
      shape: shape of the whole copy.
      indices: which rows are kept, `(kept,)`.
      rows: their values, `(kept, ...)`.
    """

    shape: tuple[int, ...]
    indices: np.ndarray
    rows: np.ndarray

    def difference(self, weight: Weight) -> str | None:
        """Returns how the copy differs from a base layer's weight, None if not.

        Values may differ by the rounding of the coarser of the two dtypes.

        Args:
          weight: the base's, `(rows, ...)` as a checkpoint stores it, of NumPy or JAX;
            only the rows that were kept are fetched.
        """
        if tuple(weight.shape) != self.shape:
            found = f"the file's base layer has shape {self.shape}"
            return f"{found}, the base's {tuple(weight.shape)}"
        base = np.asarray(weight[self.indices])
        step = max(_step(base.dtype), _step(self.rows.dtype))
        left, right = base.astype(np.float64), self.rows.astype(np.float64)
        apart = ~np.isclose(left, right, rtol=step, atol=step * 1e-3)
        if not apart.any():
            return None
        return (
            f"{int(apart.sum())} of {apart.size} compared values differ from the "
            "file's copy of the base layer"
        )


def copy_base(weight: np.ndarray) -> BaseCopy:
    """Returns the sample of a weight that the file carries."""
    rows = weight.shape[0] if weight.ndim else 0
    indices = np.unique(np.linspace(0, max(rows - 1, 0), min(rows, ROWS)).astype(int))
    return BaseCopy(weight.shape, indices, weight[indices] if rows else weight)


def _step(dtype: np.dtype) -> float:
    return {2: 2.0**-7, 4: 2.0**-22, 8: 2.0**-50}.get(dtype.itemsize, 1.0)
