"""Runs the Triton kernels without a GPU: in Triton's interpreter, on torch CPU tensors.

The interpreter must be chosen before Triton is imported, so it lives in a process of
its own. There `lora_delta` runs as it is but for its launches, which are interpreted
one program after another. Memory that a kernel must write is NaN beforehand.
"""

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import ml_dtypes
import numpy as np

from delta_cases import call_arguments
from lora_kernels.gpu_targets import Gpu

GPU = Gpu(compute_capability=90, num_sms=4)
"""A Hopper with few programs at a time, so each does several pieces of work."""

MODULES = "lora_kernels.lora_delta"

Arguments = Callable[..., tuple[tuple, dict]]


@contextmanager
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process to which the functions below can be submitted."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_prepare) as process:
        yield process


def forward(
    module: str,
    arrays: NamedTuple,
    widths: tuple[int, ...],
    arguments: Arguments = call_arguments,
) -> np.ndarray:
    """What a backend's `lora_delta` returns on `GPU`.

    Args:
      arguments: makes positional and keyword arguments of `arrays` and `widths`.
    """
    call = arguments(arrays, widths)
    return np.asarray(_called(module, "lora_delta", *call))


def backward(
    arrays: NamedTuple,
    widths: tuple[int, ...],
    arguments: Arguments = call_arguments,
) -> list[np.ndarray]:
    """What `lora_delta_backward` returns; `arrays.y` is the cotangent."""
    call = arguments(arrays, widths)
    results = _called("triton_backward", "lora_delta_backward", *call)
    return [np.asarray(result) for result in results]


def results(
    module: str, function: str, arrays: NamedTuple, arguments: Callable[..., tuple]
) -> list[np.ndarray]:
    """What a function of any backend returns on `GPU`, as a list.

    Args:
      module: whole name of the backend's module.
      arguments: makes the function's positional arguments of `arrays`.
    """
    with _interpreting():
        found = getattr(importlib.import_module(module), function)(*arguments(arrays))
    return [np.asarray(one) for one in (found if isinstance(found, tuple) else [found])]


def _prepare() -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}


def _called(module: str, function: str, positional: tuple, keywords: dict):
    with _interpreting():
        module = importlib.import_module(f"{MODULES}.{module}")
        return getattr(module, function)(*positional, **keywords)


@contextmanager
def _interpreting() -> Iterator[None]:
    from lora_kernels import triton_launch
    from lora_kernels.gpu_targets import building_for

    if triton_launch.run is not _interpreted:
        _mend_interpreter()
        triton_launch.run = _interpreted
    with building_for(GPU):
        yield


def _interpreted(launch):
    import torch

    inputs = [_to_torch(array) for array in launch.inputs]
    outputs = []
    for index, spec in enumerate(launch.outputs):
        shared = [i for i, o in launch.aliases.items() if o == index]
        if shared:
            outputs.append(inputs[shared[0]])
        else:
            dtype = getattr(torch, np.dtype(spec.dtype).name)
            outputs.append(torch.full(spec.shape, float("nan"), dtype=dtype))
    launch.kernel[launch.grid](*inputs, *outputs, **launch.constants)
    return tuple(_to_jax(output) for output in outputs)


def _to_torch(array):
    import torch

    array = np.array(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _to_jax(tensor):
    import jax.numpy as jnp
    import torch

    if tensor.dtype == torch.bfloat16:
        return jnp.asarray(tensor.view(torch.int16).numpy().view(jnp.bfloat16))
    return jnp.asarray(tensor.numpy())


def _mend_interpreter():
    # Triton 3.6 interprets a product of bfloat16 as one of their bits as integers, cuts
    # a float32 off where a GPU rounds it to bfloat16, and converts arrays of one
    # number to int, which NumPy has stopped to do.
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    truncate = interpreter.InterpreterBuilder.create_fp_trunc

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        wide = [
            self.create_fp_ext(side, tl.float32) if side.dtype == tl.bfloat16 else side
            for side in (a, b)
        ]
        data = np.matmul(wide[0].data, wide[1].data, dtype=d.data.dtype) + d.data
        return interpreter.TensorHandle(data, d.dtype.scalar)

    def create_fp_trunc(self, source, to):
        if (source.dtype.scalar, to.scalar) == (tl.float32, tl.bfloat16):
            data = source.data.astype(ml_dtypes.bfloat16).view(np.uint16)
            return interpreter.TensorHandle(data, tl.bfloat16)
        return truncate(self, source, to)

    def patched_tensor(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.create_fp_trunc = create_fp_trunc
    interpreter._patch_lang_tensor = patched_tensor
