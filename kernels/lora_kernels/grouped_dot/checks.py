"""Arguments of `grouped_dot` -> nothing, or one error that lists every fault."""

import jax
import jax.numpy as jnp

from lora_kernels.routing import Routing, routing_faults

ArrayLike = jax.Array | jax.ShapeDtypeStruct


def check_arguments(x: ArrayLike, kernel: ArrayLike, pairs: Routing) -> None:
    """Checks shapes and dtypes, at trace time.

    Raises:
      ValueError: naming every argument whose shape or dtype does not fit the others.
    """
    if x.ndim != 2 or kernel.ndim != 3:
        raise ValueError(
            "grouped_dot: expected x (rows, d_in), kernel (groups, d_in, d_out); "
            f"found {x.shape}, {kernel.shape}."
        )
    rows, d_in = x.shape
    count = pairs.slot.size
    found = []
    if kernel.shape[1] != d_in:
        found.append(f"kernel is {kernel.shape}, expected (groups, {d_in}, d_out)")
    if pairs.num_slots != kernel.shape[0]:
        found.append(
            f"pairs has {pairs.num_slots} groups, expected {kernel.shape[0]}, as "
            "kernel has"
        )
    if count % max(rows, 1) or (count and not rows):
        found.append(f"pairs has {count} rows, expected a multiple of x's {rows}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        found.append(f"x is {x.dtype}, expected a floating dtype")
    if not (jnp.issubdtype(kernel.dtype, jnp.floating) or kernel.dtype == jnp.int8):
        found.append(f"kernel is {kernel.dtype}, expected a floating dtype or int8")
    found.extend(f"pairs.{fault}" for fault in routing_faults(pairs))
    if found:
        raise ValueError(f"grouped_dot: x {x.shape}: {'; '.join(found)}.")
