"""`lora_delta` as Triton kernels, through jax-triton: Ampere and newer NVIDIA GPUs.

Few rows (`tiles.is_fused`) are one fused launch, more a shrink and an expand. A
row alone with its adapter runs on CUDA cores and rows that share one on tensor cores,
so a row's last bits may depend on whether another row of the batch has its adapter;
`triton_invariant` does without the first, and a row's bits then depend on the row and
on the shapes alone. Both are deterministic: nothing is added atomically.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lora_kernels import triton_launch
from lora_kernels.gpu_targets import current_gpu
from lora_kernels.lora_delta.tiles import is_fused, most_splits
from lora_kernels.lora_delta.triton_forms import (
    Call,
    decode_launch,
    expand_launch,
    shrink_launch,
)
from lora_kernels.routing import Routing

DTYPES = ("float32", "bfloat16", "float16")

LOWEST_CAPABILITY = 80
"""Ampere, the first with bfloat16 products and asynchronous copies."""

OFFSETS = 2**31
"""Kernels address the numbers of x, y, h and one slot with 32 bit."""


def lora_delta(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    a: Float[Array, "slots parts max_rank d_in"],
    b: Float[Array, "slots max_rank d_out"],
    *,
    scale: Float[Array, "slots parts"],
    rank: Int32[Array, "slots parts"],
    routing: Routing,
    part_widths: tuple[int, ...],
) -> Float[Array, "tokens d_out"]:
    """Returns `y` plus each token's low-rank update; see `api.lora_delta`."""
    call = checked_call(x, y, a, b, scale, rank, routing, part_widths)
    return delta(x, y, call, vector_rows=1)


def delta(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    call: Call,
    *,
    vector_rows: int,
) -> Float[Array, "tokens d_out"]:
    """Returns `y` plus the update; items of `vector_rows` rows run on CUDA cores."""
    if 0 in (*x.shape, *y.shape, call.max_rank):
        return y
    if is_fused(tokens=y.shape[0], slots=call.a.shape[0]):
        launch = decode_launch(x, y, call, vector_rows=vector_rows)
    else:
        (h,) = triton_launch.run(shrink_launch(x, call.a, call))
        launch = expand_launch(h, y, call.b, call)
    return triton_launch.run(launch)[0]


def checked_call(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    a: Float[Array, "slots parts max_rank d_in"],
    b: Float[Array, "slots max_rank d_out"],
    scale: Float[Array, "slots parts"],
    rank: Int32[Array, "slots parts"],
    routing: Routing,
    part_widths: tuple[int, ...],
) -> Call:
    """Returns the arguments as a call, or refuses what the kernels cannot do.

    Raises:
      NotImplementedError: naming the GPU, the versions, a dtype or a size.
    """
    gpu = current_gpu()
    capability = gpu.compute_capability
    if capability < LOWEST_CAPABILITY:
        raise NotImplementedError(
            f"needs compute capability 8.0 (Ampere); found {capability / 10}"
        )
    triton_launch.check_versions()
    for name, array in {"x": x, "y": y, "a": a, "b": b}.items():
        if array.dtype not in DTYPES:
            raise NotImplementedError(
                f"{name} is {array.dtype}; supported: {', '.join(DTYPES)}"
            )
    dtypes = {jnp.dtype(array.dtype) for array in (x, y, a, b)}
    if len(dtypes) > 1 and jnp.dtype("float16") in dtypes:
        raise NotImplementedError(
            f"x is {x.dtype}, y {y.dtype}, a {a.dtype} and b {b.dtype}; supported: the "
            "same, or float32 and bfloat16"
        )
    parts, max_rank = a.shape[1:3]
    splits = most_splits(tokens=y.shape[0], parts=1, gpu=gpu)
    h = (splits, y.shape[0], parts * max_rank)
    addressed = {"x": x.shape, "y": y.shape, "a": a.shape[1:], "b": b.shape[1:], "h": h}
    for name, shape in addressed.items():
        if math.prod(shape) >= OFFSETS:
            raise NotImplementedError(
                f"{name} {shape} has {math.prod(shape)} numbers to address; at most "
                f"{OFFSETS - 1} are supported"
            )
    return Call(
        a,
        b,
        scale.astype(jnp.float32),
        rank.astype(jnp.int32),
        part_widths,
        routing,
    )
