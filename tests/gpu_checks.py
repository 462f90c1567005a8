"""What is asserted of every program that is compiled for a GPU."""

import re
import tempfile
from pathlib import Path

import jax
import pytest

from gpu_report import KERNEL
from lora_kernels.gpu_targets import described_gpu
from lora_kernels.gpu_targets.compile_only import compile_for, kernel_reports


def check_kernels(target, case, function, record_property):
    """Compiles a call, asserts that its kernels fit the GPU, returns their names.

    Each is recorded for the table that a run prints at its end.
    """
    with kernel_reports() as reports:
        compiled = compile_for(target, function, case.arguments)
        found = reports()
    temp = compiled.memory_analysis().temp_size_in_bytes
    for report in found:
        shared = report.shared_memory
        row = (report.name, case.name, target, report.registers, shared, temp)
        record_property(KERNEL, row)
        assert not report.spilled, report
        assert shared <= described_gpu(target).shared_memory, report
    return sorted(report.name for report in found)


def check_mosaic_kernels(target, case, function, record_property):
    """Does what `check_kernels` does for kernels of Mosaic; returns their number."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
        patch.setenv("MOSAIC_GPU_DUMP_TO", folder)
        compiled = compile_for(target, function, case.arguments)
        said = sorted(Path(folder).glob("*.ptxas"))
        for path in said:
            text = path.read_text()
            passes = path.with_name(f"{path.stem}.mlir-passes.log").read_text()
            registers = int(re.findall(r"Used (\d+) registers", text)[0])
            size = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes)[0]
            temp = compiled.memory_analysis().temp_size_in_bytes
            row = ("mosaic_gpu", case.name, target, registers, int(size), temp)
            record_property(KERNEL, row)
            assert "0 bytes spill stores, 0 bytes spill loads" in text, text
            assert int(size) <= described_gpu(target).shared_memory, row
    return len(said)


def copies_of(bank, hlo):
    """Copies in a program's text that have the shape of one of the bank's arrays."""
    names = {"bfloat16": "bf16", "float32": "f32", "int32": "s32"}
    shapes = {
        f"{names[leaf.dtype.name]}[{','.join(map(str, leaf.shape))}]"
        for leaf in jax.tree.leaves(bank)
        if leaf.ndim > 2
    }
    copied = re.findall(r"= \(?(\w+\[[\d,]*\])\S* (?:copy|copy-start)\(", hlo)
    return [shape for shape in copied if shape in shapes]
