"""Layouts of arrays that several files of this op name."""

from jaxtyping import Array, Float, Int8

Kernel = Float[Array, "groups d_in d_out"] | Int8[Array, "groups d_in d_out"]
"""One matrix for each group. Integers are multiplied as the numbers that they are: what
one of them is worth, the caller multiplies into the product."""
