"""The dtypes and precisions in which all ops compute, in plain XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def wide_dtype(*arrays: Array) -> jnp.dtype:
    """Returns the dtype to accumulate in: float32, or float64 if any array has it."""
    return jnp.promote_types(jnp.float32, jnp.result_type(*arrays))


def precision_of(*arrays: Array) -> jax.lax.Precision:
    """Returns the precision of products that are summed in the wide dtype.

    A GPU multiplies float32 as TF32 unless told otherwise. That has the range of
    float32 and more digits than 16 bit hold: enough where nothing is float32.
    """
    narrow = all(array.dtype.itemsize < 4 for array in arrays)
    return jax.lax.Precision.DEFAULT if narrow else jax.lax.Precision.HIGHEST


def as_bits(array: Array) -> Array:
    """Returns an array to slice from: bfloat16 as integers.

    XLA widens a bfloat16 array on a CPU before it slices it, all of it in every call
    (jax 0.10.2; not in 0.12). Integers it slices as they are.
    """
    if array.dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(array, jnp.uint16)
    return array


def from_bits(bits: Array, like: Array, dtype: jnp.dtype) -> Array:
    """Returns what was cut out of `as_bits(like)`, in another dtype."""
    if bits.dtype != like.dtype:
        bits = jax.lax.bitcast_convert_type(bits, like.dtype)
    return bits.astype(dtype)
