"""Gradients of `grouped_dot` as Triton kernels; the formulas are in `backward`."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from lora_kernels import triton_launch
from lora_kernels.grouped_dot.backward import Gradients
from lora_kernels.grouped_dot.triton import check_supported
from lora_kernels.grouped_dot.triton_forms import gradient_launch, product_launch
from lora_kernels.routing import Routing


def grouped_dot_backward(
    x: Float[Array, "rows d_in"],
    g: Float[Array, "pairs d_out"],
    kernel: Float[Array, "groups d_in d_out"],
    pairs: Routing,
) -> Gradients:
    """Returns the cotangents; see `backward.grouped_dot_backward`."""
    check_supported(x, kernel, pairs)
    launch = product_launch(
        g, kernel, pairs, transposed=True, dtype=jnp.dtype("float32")
    )
    (dx_of_pair,) = triton_launch.run(launch)
    dx = dx_of_pair.reshape(x.shape[0], -1, x.shape[1]).sum(axis=1)
    (dkernel,) = triton_launch.run(gradient_launch(x, g, kernel, pairs))
    return Gradients(dx.astype(x.dtype), dkernel)
