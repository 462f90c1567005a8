"""Which GPU the kernels are built for, and descriptions of GPUs that need not be there.

The `*.txtpb` files are XLA's target descriptions: with one of them, and the packages of
the extra `gpu-check`, a machine without a GPU compiles for it (see `compile_only`).
Source: openxla/xla, `xla/backends/gpu/target_config/specs`.
"""

import contextlib
import contextvars
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

import jax

NAMES = ("a100", "h100", "h200")
"""GPUs with a description in this folder."""


@dataclass(frozen=True)
class Gpu:
    """The facts of a GPU that a kernel's tiles depend on.

    Attributes:
      compute_capability: major and minor in one number; 90 is Hopper.
      num_sms: streaming multiprocessors.
    """

    compute_capability: int
    num_sms: int

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one thread block can have."""
        return SHARED_MEMORY.get(self.compute_capability, SMALLEST_SHARED_MEMORY)


SHARED_MEMORY = {80: 166912, 87: 166912, 90: 232448, 100: 232448, 103: 232448}
"""Bytes by compute capability. Source: feature table of the CUDA C++ guide."""

SMALLEST_SHARED_MEMORY = 101376
"""Bytes that every GPU from Ampere on has, less 1 KiB that the driver keeps."""

_chosen = contextvars.ContextVar[Gpu | None]("gpu", default=None)


def description(name: str) -> str:
    """Returns XLA's description of a GPU named in `NAMES`."""
    return (
        files("lora_kernels.gpu_targets")
        .joinpath(f"{name}.txtpb")
        .read_text(encoding="utf-8")
    )


def described_gpu(name: str) -> Gpu:
    """Returns the facts of a GPU named in `NAMES`."""
    text = description(name)
    cores = re.search(r"core_count: (\d+)", text)
    version = re.search(
        r"cuda_compute_capability \{ major: (\d+)( minor: (\d+))?", text
    )
    assert cores, name
    assert version, name
    capability = int(version[1]) * 10 + int(version[3] or 0)
    return Gpu(compute_capability=capability, num_sms=int(cores[1]))


@contextlib.contextmanager
def building_for(gpu: Gpu) -> Iterator[None]:
    """Kernels traced inside are built for `gpu`, whatever this machine has."""
    token = _chosen.set(gpu)
    try:
        yield
    finally:
        _chosen.reset(token)


def current_gpu() -> Gpu:
    """Returns the GPU to build for: that of `building_for`, else JAX's first device.

    Raises:
      NotImplementedError: if there is neither, or the GPU is not NVIDIA's.
    """
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or not re.fullmatch(r"\d+\.\d+", capability):
        raise NotImplementedError(
            f"needs an NVIDIA GPU; JAX's default device is {device.device_kind} "
            f"({device.platform})"
        )
    major, minor = capability.split(".")
    return Gpu(int(major) * 10 + int(minor), int(device.core_count))
