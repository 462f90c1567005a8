"""A description of one kernel launch -> its outputs. The only file that runs a kernel.

jax-triton compiles the kernel. Its own `triton_call` puts the launch into a custom call
that XLA keeps out of command buffers (CUDA graphs), so a decode step would be cut into
as many graphs as it has sites; `run` uses the custom call that JAX itself registers for
Triton kernels, which XLA does capture.
"""

import zlib
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import jax_triton
import triton
from jax_triton import triton_lib

from lora_kernels.gpu_targets import current_gpu

Constant: TypeAlias = int | bool | tuple[int, ...] | None

CUSTOM_CALL = "triton_kernel_call_ffi"
"""Registered by JAX's CUDA plugin; Pallas' Triton backend uses the same."""

ALIGNMENT = 16
"""Bytes at whose multiples XLA lets every buffer start (it does so at more)."""

TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32"}
"""JAX's names of dtypes -> Triton's."""


@dataclass(frozen=True)
class Launch:
    """One launch: `kernel[grid](*inputs, *outputs, **constants)`.

    Attributes:
      outputs: shapes and dtypes of what the kernel writes, not initialised.
      aliases: input -> output that is the same memory.
    """

    kernel: triton.JITFunction
    inputs: tuple[jax.Array, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    aliases: dict[int, int]
    grid: tuple[int, ...]
    constants: dict[str, Constant]
    warps: int
    stages: int


def run(launch: Launch) -> tuple[jax.Array, ...]:
    """Returns the outputs of a launch on the GPU that is being built for.

    Under `jax.vmap` it is one launch after another.
    """
    arrays = (*launch.inputs, *launch.outputs)
    kernel, _ = triton_lib.get_or_create_triton_kernel(
        triton_lib.get_cuda_backend,
        "cuda",
        launch.kernel,
        [f"*{TYPES[jnp.dtype(array.dtype).name]}" for array in arrays],
        (),
        num_warps=launch.warps,
        num_stages=launch.stages,
        num_ctas=1,
        compute_capability=current_gpu().compute_capability,
        enable_fp_fusion=True,
        metaparams=launch.constants,
        dump=False,
    )
    library = triton_lib.triton_kernel_call_lib
    call = library.TritonKernelCall(
        kernel,
        *launch.grid,
        *(1,) * (3 - len(launch.grid)),
        [library.create_array_parameter(0, ALIGNMENT) for _ in arrays],
    )
    name = launch.kernel.fn.__name__
    custom_call = jax.ffi.ffi_call(
        CUSTOM_CALL,
        launch.outputs,
        input_output_aliases=launch.aliases,
        vmap_method="sequential",
    )
    opaque = zlib.compress(call.to_proto(name, b""))
    return tuple(custom_call(*launch.inputs, name=name, opaque=opaque))


def check_versions() -> None:
    """Refuses versions that are known not to work together.

    Raises:
      NotImplementedError: naming what is installed and what to install.
    """
    if not jax_triton.__version__.startswith("0.3."):
        raise NotImplementedError(
            f"jax-triton {jax_triton.__version__} is not supported: from 0.4 on it has "
            "another interface and does not trace under every JAX that this package "
            "supports; install jax-triton==0.3.1"
        )
