"""Measured points -> a table, a JSON file that says where, and a log-log plot."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from lora_kernels.lora_delta.cost import Peaks

if TYPE_CHECKING:
    from lora_kernels.lora_delta.bench import Point

COLUMNS = "{:30.30} {:>15.15} {:>10} {:>9} {:>9} {:>9} {:>9} {:>8}"
"""Width of the table's columns, in characters."""

MOST_CHARACTERS = 2000
"""Of an error's text in a result: XLA's may have pages."""

VERSIONED = ("jax", "jaxlib", "numpy", "torch", "triton", "jax-triton")
"""Packages whose versions a result names, where they are installed."""


def header() -> str:
    """Returns the table's first line; times are of one op."""
    return COLUMNS.format(
        "spec",
        "implementation",
        "median us",
        "p10",
        "p90",
        "cpu",
        "roofline",
        "of base",
    )


def rows(points: Sequence[Point]) -> str:
    """Returns one line for each point."""
    return "\n".join(_row(point) for point in points)


def _row(point: Point) -> str:
    if point.median_us is None:
        why = f"failed: {point.failure}" if point.failure else point.refusal
        return f"{point.spec:30.30} {point.implementation:>15.15} {why}"
    return COLUMNS.format(
        point.spec,
        point.implementation,
        f"{point.median_us:.1f}",
        f"{point.p10_us:.1f}",
        f"{point.p90_us:.1f}",
        f"{point.cpu_us:.1f}",
        "" if point.roofline is None else f"{point.roofline:.1%}",
        "" if point.base_ratio is None else f"{point.base_ratio:.2f}x",
    )


def failure_text(error: Exception) -> str:
    """Returns type and message of an error, its first lines."""
    return f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]


def above_roofline(points: Sequence[Point]) -> list[str]:
    """Returns which points were faster than the peaks allow.

    Then a cache held what was counted as read from memory, or the peaks were measured
    while the device was busy.
    """
    return [
        f"{point.spec} {point.implementation}"
        for point in points
        if point.roofline is not None and point.roofline > 1
    ]


def closing(points: Sequence[Point], peaks: dict[str, Peaks]) -> str:
    """Returns the table's last lines: the peaks, and what is above the roofline."""
    lines = [
        f"{dtype}: peak {peak.bytes_per_s / 1e9:.1f} GB/s, "
        f"{peak.flops_per_s / 1e9:.0f} GFLOP/s, best of the run"
        for dtype, peak in peaks.items()
    ]
    lines += [f"above the roofline: {name}" for name in above_roofline(points)]
    return "\n".join(lines)


def environment() -> dict[str, object]:
    """Returns where the numbers come from: date, device, processor, versions."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": device.platform,
        "device": device.device_kind,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in VERSIONED if _version(name)},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_json(path: Path, points: Sequence[Point], peaks: dict[str, Peaks]) -> None:
    """Writes every point, the measured peaks and the environment."""
    content = {
        "environment": environment(),
        "peaks": {dtype: peak._asdict() for dtype, peak in peaks.items()},
        "above_roofline": above_roofline(points),
        "points": [dataclasses.asdict(point) for point in points],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def lines_of(points: Sequence[Point]) -> dict[str, list[tuple[int, float]]]:
    """Returns the lines of the plot: tokens and median microseconds, by tokens."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for point in points:
        if point.median_us is not None:
            family = point.spec.rsplit("/", 1)[0]
            line = lines.setdefault(f"{family} {point.implementation}", [])
            line.append((point.tokens, point.median_us))
    return {label: sorted(values) for label, values in lines.items()}


def write_png(path: Path, points: Sequence[Point]) -> None:
    """Plots the median time of one op against the number of tokens, log-log.

    One line for each implementation and family of specs (a name up to its last slash).

    Raises:
      ImportError: if matplotlib is not installed, naming the extra that brings it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "a plot needs matplotlib: pip install 'lora-jax[bench]'"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 6))
    for label, values in lines_of(points).items():
        tokens, medians = zip(*values, strict=True)
        axes.loglog(tokens, medians, marker="o", label=label)
    axes.set_xlabel("tokens")
    axes.set_ylabel("microseconds of one op, median")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
