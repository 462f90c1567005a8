"""Products inside a Triton kernel: float32 sums, on tensor cores where they can be."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def product(left, right, total):
    """`total + left @ right` in float32, on tensor cores where both are 16 bit."""
    if left.dtype == right.dtype and left.dtype != tl.float32:
        total = tl.dot(left, right, total)
    else:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="tf32x3")
    return total


@triton.jit
@no_type_check
def product_of_float32(left, right, total):
    """`total + left @ right` for a float32 left side that keeps its precision.

    The low-rank intermediate is float32. Rounded to bfloat16 once it would lose 16 of
    its 24 bits; as a sum of two bfloat16 numbers it keeps 16. float16 would overflow.
    """
    if right.dtype == tl.bfloat16:
        high = left.to(tl.bfloat16)
        low = (left - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(high, right, total)
        total = tl.dot(low, right, total)
    elif right.dtype == tl.float16:
        # tf32 keeps 11 bits and the range of float32; the right side fits into it.
        right = right.to(tl.float32)
        bits = left.to(tl.int32, bitcast=True) & -8192
        high = bits.to(tl.float32, bitcast=True)
        total = tl.dot(high, right, total, input_precision="tf32")
        total = tl.dot(left - high, right, total, input_precision="tf32")
    else:
        total = tl.dot(left, right, total, input_precision="tf32x3")
    return total
