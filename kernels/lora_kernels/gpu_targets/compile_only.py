"""Compiles for a GPU that need not be there, and reads what the compilers say.

Needs the packages of the extra `gpu-check`. Knows no kernel: a function goes in; XLA's
executable, what it launches, and the assembler's report of each Triton kernel come out.
Source: `test_deviceless_aot_compile` in JAX's `tests/aot_test.py`.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from lora_kernels.gpu_targets import building_for, described_gpu, description


@dataclass(frozen=True)
class KernelReport:
    """What the assembler says of one Triton kernel.

    Attributes:
      spilled: bytes stored to and loaded from local memory for lack of registers.
      shared_memory: bytes of one thread block.
    """

    name: str
    registers: int
    spilled: int
    shared_memory: int


@dataclass(frozen=True)
class Thunk:
    """One thing that the compiled program makes the GPU do.

    Attributes:
      kind: XLA's name; kCustomCall is a kernel of ours, kCustomKernel one of XLA's.
      captured: whether it is part of a command buffer (a CUDA graph).
    """

    kind: str
    name: str
    captured: bool


def compile_for(
    target: str,
    function: Callable[..., Any],
    *arguments: Any,
    donate: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Returns `jit(function)` compiled for a GPU named in `gpu_targets.NAMES`.

    Args:
      target: name of the GPU.
      function: what to compile.
      arguments: pytrees of anything with a shape and a dtype.
      donate: arguments whose memory the function may reuse.
      options: further XLA options.
    """
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology="1x1x1",
        target_config=description(target),
    )
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        arguments,
    )
    jax.clear_caches()  # JAX must not reuse what it has traced for another GPU.
    with building_for(described_gpu(target)):
        lowered = (
            jax.jit(function, donate_argnums=donate)
            .trace(*shapes)
            .lower(lowering_platforms=("cuda",))
        )
    # There is no GPU to time candidates on.
    return lowered.compile({"xla_gpu_autotune_level": "0", **(options or {})})


def compile_with_thunks(
    target: str,
    function: Callable[..., Any],
    *arguments: Any,
    donate: tuple[int, ...] = (),
) -> tuple[jax.stages.Compiled, list[Thunk]]:
    """Returns what `compile_for` returns, and what the program does step by step."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = compile_for(
            target, function, *arguments, donate=donate, options=options
        )
        # There is a second file only if command buffers were made.
        paths = sorted(Path(folder).glob("*.thunk_sequence*.txt"), key=_last_pass)
        return compiled, list(_thunks(paths[-1].read_text()))


def _last_pass(path: Path) -> bool:
    return "after_thunk_passes" in path.name


def _thunks(listing: str) -> Iterator[Thunk]:
    for line in listing.splitlines():
        found = re.match(r"( *)\d+: (k\w+) +\[[^]]*\] ?(\S*)", line)
        if found and found[2] != "kCommandBuffer":
            yield Thunk(kind=found[2], name=found[3], captured=bool(found[1]))


@contextmanager
def kernel_reports() -> Iterator[Callable[[], list[KernelReport]]]:
    """Yields a function that reports on the Triton kernels compiled since."""
    from jax_triton import triton_lib

    with tempfile.TemporaryDirectory() as folder:
        before = triton_lib._JAX_TRITON_DUMP_DIR
        triton_lib._JAX_TRITON_DUMP_DIR = folder
        triton_lib._COMPILED_KERNEL_CACHE.clear()
        try:
            yield lambda: [_report(path) for path in Path(folder).rglob("*.ptx")]
        finally:
            triton_lib._JAX_TRITON_DUMP_DIR = before


def ptxas() -> Path:
    """Returns the assembler that XLA uses: that of the installed CUDA packages.

    Raises:
      FileNotFoundError: if there is none.
    """
    found = [
        path
        for folder in sys.path
        for path in sorted(Path(folder).glob("nvidia/cu*/bin/ptxas"))
    ]
    if not found:
        raise FileNotFoundError(
            "no ptxas among the installed packages; install the extra gpu-check"
        )
    return found[0]


def _report(ptx: Path) -> KernelReport:
    found = re.search(r"^\.target (\w+)", ptx.read_text(), re.MULTILINE)
    assert found, ptx
    command = [ptxas(), "-v", "--gpu-name", found[1], ptx, "-o", ptx.with_suffix(".o")]
    said = subprocess.run(command, capture_output=True, check=True, text=True).stderr
    shared = re.search(r"shared_mem_bytes: (\d+)", _info(ptx))
    assert shared, ptx
    return KernelReport(
        name=ptx.stem,
        registers=_number(r"Used (\d+) registers", said),
        spilled=_number(r"(\d+) bytes spill stores", said)
        + _number(r"(\d+) bytes spill loads", said),
        shared_memory=int(shared[1]),
    )


def _info(ptx: Path) -> str:
    return ptx.with_suffix(".compile_info").read_text()


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in: {text}"
    return int(found[1])
