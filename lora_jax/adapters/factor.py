"""The best low-rank factors of a matrix, or of a product of factors.

By Eckart and Young the truncated singular value decomposition is the nearest matrix of
its rank; the singular values are shared evenly between the two factors.
"""

import numpy as np

Factors = tuple[np.ndarray, np.ndarray]
"""`a (rank, d_in)` and `b (d_out, rank)`, float32, whose product `b @ a` is meant."""


def factor_matrix(matrix: np.ndarray, rank: int) -> tuple[Factors, float]:
    """Returns the best factors of a matrix `(d_out, d_in)`, and what they keep.

    Returns:
      The factors, of the matrix's own rank where that is smaller, and the share of the
      squared length that they keep, in [0, 1].
    """
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return _cut(left, values, right, rank)


def factor_product(a: np.ndarray, b: np.ndarray, rank: int) -> tuple[Factors, float]:
    """Returns the best factors of `b @ a` without forming the product.

    Args:
      a: `(inner, d_in)`.
      b: `(d_out, inner)`.
      rank: rank of the result at most.
    """
    left_basis, left = np.linalg.qr(b)
    right_basis, right = np.linalg.qr(a.T)
    inner, values, outer = np.linalg.svd(left @ right.T)
    return _cut(left_basis @ inner, values, outer @ right_basis.T, rank)


def _cut(
    left: np.ndarray, values: np.ndarray, right: np.ndarray, rank: int
) -> tuple[Factors, float]:
    floor = values[0] * np.finfo(values.dtype).eps * 8 if len(values) else 0.0
    kept = max(1, min(rank, int((values > floor).sum())))
    root = np.sqrt(values[:kept])
    a, b = root[:, None] * right[:kept], left[:, :kept] * root
    whole = float((values.astype(np.float64) ** 2).sum())
    share = (
        float((values[:kept].astype(np.float64) ** 2).sum()) / whole if whole else 1.0
    )
    return (a.astype(np.float32), b.astype(np.float32)), share
