"""What is asserted of every program that is compiled for a GPU."""

import re

import jax

from lora_kernels.gpu_targets import described_gpu
from lora_kernels.gpu_targets.compile_only import compile_for, kernel_reports


def check_kernels(target, case, function, table):
    """Compiles a call, asserts that its kernels fit the GPU, returns its reports."""
    with kernel_reports() as reports:
        compiled = compile_for(target, function, case.arguments)
        found = reports()
    temp = compiled.memory_analysis().temp_size_in_bytes
    for report in found:
        shared = report.shared_memory
        table.append((report.name, case.name, target, report.registers, shared, temp))
        assert not report.spilled, report
        assert shared <= described_gpu(target).shared_memory, report
    return sorted(report.name for report in found)


def print_table(rows):
    """Prints the rows that `check_kernels` has added."""
    print(f"\n{'kernel':16} {'call':36} {'target':6} {'regs':>4} {'shared':>7} temp")
    for name, call, target, registers, shared, temp in sorted(set(rows)):
        print(f"{name:16} {call:36} {target:6} {registers:4} {shared:7} {temp}")


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
