"""What tests of compiled GPU programs have recorded -> lines for the end of the run.

A test records with pytest's `record_property`, so that a passing run prints it too.
"""

from collections.abc import Iterable

KERNEL = "gpu kernel"
"""Records (kernel, call, target, registers, shared memory, temp bytes)."""

LINE = "gpu program"
"""Records one line of text."""


def report_lines(properties: Iterable[tuple[str, object]]) -> list[str]:
    """Returns a table of kernels and the lines, without repetition."""
    found = [(key, value) for key, value in properties]
    rows = sorted({tuple(value) for key, value in found if key == KERNEL})
    lines = sorted({value for key, value in found if key == LINE})
    head = ("kernel", "call", "target", "regs", "shared", "temp")
    return [_row(*row) for row in ([head, *rows] if rows else [])] + lines


def _row(name, call, target, registers, shared, temp) -> str:
    return f"{name:16} {call:44} {target:6} {registers:>4} {shared:>7} {temp:>9}"
