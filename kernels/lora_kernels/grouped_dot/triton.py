"""`grouped_dot` as a Triton kernel, through jax-triton: Ampere and newer NVIDIA GPUs.

One launch over the compact work list: it gathers rows of x by the pairs' order and
writes each pair's row, without a sorted copy of either. A pair's bits depend on its
row, its kernel and the shapes alone.
"""

from jaxtyping import Array, Float

from lora_kernels import triton_launch
from lora_kernels.gpu_targets import current_gpu
from lora_kernels.grouped_dot.shapes import Kernel
from lora_kernels.grouped_dot.triton_forms import product_launch
from lora_kernels.routing import Routing

DTYPES = ("float32", "bfloat16", "float16")

LOWEST_CAPABILITY = 80
"""Ampere, the first with bfloat16 products and asynchronous copies."""

OFFSETS = 2**31
"""Kernels address the numbers of x, of the output and of one kernel with 32 bit."""


def grouped_dot(
    x: Float[Array, "rows d_in"],
    kernel: Kernel,
    pairs: Routing,
) -> Float[Array, "pairs d_out"]:
    """Returns each pair's product; see `api.grouped_dot`."""
    check_supported(x, kernel, pairs)
    launch = product_launch(x, kernel, pairs, transposed=False, dtype=x.dtype)
    return triton_launch.run(launch)[0]


def check_supported(
    x: Float[Array, "rows d_in"],
    kernel: Kernel,
    pairs: Routing,
) -> None:
    """Refuses what the kernels cannot do.

    Raises:
      NotImplementedError: naming the GPU, the versions, a dtype or a size.
    """
    capability = current_gpu().compute_capability
    if capability < LOWEST_CAPABILITY:
        raise NotImplementedError(
            f"needs compute capability 8.0 (Ampere); found {capability / 10}"
        )
    triton_launch.check_versions()
    count, (_, d_in, d_out) = pairs.slot.shape[0], kernel.shape
    if 0 in (count, d_in, d_out):
        raise NotImplementedError("an axis of length 0")
    for name, array in {"x": x, "kernel": kernel}.items():
        if array.dtype not in DTYPES:
            raise NotImplementedError(
                f"{name} is {array.dtype}; supported: {', '.join(DTYPES)}"
            )
    sizes = {
        "x": x.size,
        "one kernel": d_in * d_out,
        "the output": count * d_out,
        "the gradient of each pair's row": count * d_in,
    }
    for name, numbers in sizes.items():
        if numbers >= OFFSETS:
            raise NotImplementedError(
                f"{name} has {numbers} numbers to address; at most {OFFSETS - 1} are "
                "supported"
            )
