"""Values and products that a narrow dtype cannot hold, found before they are served."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from lora_jax.adapters.parts import (
    AdapterPart,
    EmbeddingLowRank,
    LowRank,
    arrays,
    nested,
)


def value_overflows(parts: Mapping[str, AdapterPart], dtype: np.dtype) -> list[str]:
    """Returns one text for each array with values that become infinite in a dtype."""
    top = _largest(dtype)
    found = []
    for module, part in parts.items():
        for name, array in arrays(part):
            if array.size and array.dtype.itemsize >= dtype.itemsize:
                size = float(np.abs(array).max())
                if np.isfinite(size) and size > top:
                    text = f"{module}: {name} has values up to {size:.3g}"
                    found.append(f"{text}, {dtype} holds {top:.3g} at most")
    return found


def product_overflows(part: AdapterPart, dtype: np.dtype) -> str | None:
    """Returns how the scaled product of a part exceeds a dtype, None if it does not.

    Lengths of rows and columns bound the product; it is made only where they do not
    settle the question.
    """
    pairs = [p for p in nested(part) if isinstance(p, LowRank | EmbeddingLowRank)]
    top = _largest(dtype)
    for pair in pairs:
        a, b = pair.a.astype(np.float32), pair.b.astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            across, down = (
                np.linalg.norm(a, axis=0).max(),
                np.linalg.norm(b, axis=1).max(),
            )
            if abs(pair.scale) * float(across) * float(down) <= top:
                continue
            size = abs(pair.scale) * float(np.abs(b @ a).max())
        if not size <= top:
            return f"scale * B A has values up to {size:.3g}, {dtype} holds {top:.3g}"
    return None


def _largest(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)
