"""`python -m lora_kernels.lora_delta.bench`: implementations x specs, timed.

One point is the delta of one site, from (x, y, slot arrays, routing) to y. To see the
kernel and not its dispatch, many ops over a pool of argument sets run in one jit, one
after another, and the time is divided by their number. The implementations take turns
within a round, so that a busy neighbour meets all of them. In the same rounds run the
base projection of the site, the making of a routing, and a call without an op.

On a CPU the forms that users of PyTorch have always run too, where torch is installed.
An implementation that refuses or fails is a point that says so; others go on.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lora_kernels.lora_delta import bench_calls, bench_report, cost, torch_forms
from lora_kernels.lora_delta.api import IMPLEMENTATIONS
from lora_kernels.lora_delta.bench_calls import BASE, BESIDE, XLA_FORMS, Call
from lora_kernels.lora_delta.bench_pool import Pool, pool_of
from lora_kernels.lora_delta.specs import Spec
from lora_kernels.lora_delta.suites import suites

KNOWN = (*IMPLEMENTATIONS, *XLA_FORMS, *torch_forms.FORMS)
"""Names that can be timed."""

FEWEST_ROUNDS = 3
"""Rounds of an implementation, however slow it is."""

WIPE_BYTES = 256 * 2**20
"""Written before each call on an accelerator, so that its cache holds no argument."""


@dataclass(frozen=True)
class Point:
    """One measured pair of spec and implementation; times are of one op.

    Attributes:
      ops: ops of one timed call.
      rounds: timed calls.
      cpu_us: least processor time of one op, all threads together: on a shared machine
        what neighbours disturb least. Of no meaning on an accelerator.
      bytes, flops: the least that the workload needs; None where that says nothing.
      roofline: share of the roofline reached by the median, of 1.
      base_ratio: median as a share of the base projection's median.
      refusal: why the implementation refused; None if it did not.
      failure: type and message of the error that ended it; None if there was none.
    """

    spec: str
    implementation: str
    tokens: int
    dtype: str = ""
    ops: int | None = None
    rounds: int | None = None
    median_us: float | None = None
    min_us: float | None = None
    cpu_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    bytes: float | None = None
    flops: float | None = None
    roofline: float | None = None
    base_ratio: float | None = None
    refusal: str | None = None
    failure: str | None = None


def measure(
    spec: Spec,
    implementations: Sequence[str],
    *,
    rounds: int,
    seconds: float,
    peaks: cost.Peaks,
) -> list[Point]:
    """Returns one point for each implementation, and for what runs beside them.

    Args:
      implementations: of `KNOWN`.
      rounds: timed calls of each.
      seconds: for the timed calls of all; who has used its share has no more rounds.
      peaks: of the device, for the roofline.
    """
    names = [*BESIDE, *implementations]
    blank = {name: Point(spec.name, name, spec.tokens, spec.dtype) for name in names}
    try:
        pool = pool_of(spec)
    except Exception as error:
        return [_without_times(point, error) for point in blank.values()]
    runs, errors = _timed_rounds(
        {name: _preparing(name, spec, pool) for name in names}, rounds, seconds
    )
    base = float(np.median(runs[BASE].wall)) if BASE in runs else None
    least = dict.fromkeys(implementations, cost.needed(spec, pool.slot))
    least[BASE] = cost.base_cost(spec)
    points = [
        _without_times(blank[name], errors[name])
        if name in errors
        else _with_times(blank[name], runs[name], least.get(name), base)
        for name in names
    ]
    return rated(points, {spec.dtype: peaks})


def rated(points: Iterable[Point], peaks: dict[str, cost.Peaks]) -> list[Point]:
    """Returns the points with their share of the roofline that has these peaks."""
    return [
        point
        if point.bytes is None or point.flops is None or point.median_us is None
        else dataclasses.replace(
            point,
            roofline=cost.roofline_seconds(
                cost.Cost(point.bytes, point.flops), peaks[point.dtype]
            )
            / (point.median_us * 1e-6),
        )
        for point in points
    ]


def _without_times(point: Point, error: Exception) -> Point:
    if isinstance(error, NotImplementedError | ImportError):
        return dataclasses.replace(point, refusal=str(error))
    return dataclasses.replace(point, failure=bench_report.failure_text(error))


def _with_times(
    point: Point, run: "_Run", least: cost.Cost | None, base: float | None
) -> Point:
    median, fastest, p10, p90 = np.percentile(run.wall, [50, 0, 10, 90])
    return dataclasses.replace(
        point,
        ops=run.ops,
        rounds=len(run.wall),
        median_us=float(median * 1e6),
        min_us=float(fastest * 1e6),
        cpu_us=min(run.cpu) * 1e6,
        p10_us=float(p10 * 1e6),
        p90_us=float(p90 * 1e6),
        bytes=least.bytes if least else None,
        flops=least.flops if least else None,
        base_ratio=float(median / base) if base else None,
    )


class _Run(NamedTuple):
    """Seconds of one op, wall and processor, one number a round; ops of a call."""

    wall: list[float]
    cpu: list[float]
    ops: int


def _preparing(name: str, spec: Spec, pool: Pool) -> Callable[[], Call]:
    if name in torch_forms.FORMS:
        return lambda: Call(torch_forms.prepare(name, spec, pool), pool.ops)
    return lambda: bench_calls.prepare(name, spec, pool)


def _timed_rounds(
    preparing: dict[str, Callable[[], Call]], rounds: int, seconds: float
) -> tuple[dict[str, _Run], dict[str, Exception]]:
    """Returns the runs, and the error of each that could not be prepared or run."""
    calls: dict[str, Call] = {}
    runs: dict[str, _Run] = {}
    errors: dict[str, Exception] = {}
    wipe = _wiping()
    share = seconds / len(preparing)
    for number in range(-1, rounds):
        for name, prepare in preparing.items():
            run = runs.get(name)
            spent = sum(run.wall) * run.ops if run else 0.0
            if name in errors or (number >= FEWEST_ROUNDS and spent > share):
                continue
            try:
                if number < 0:  # the first call allocates
                    calls[name] = prepare()
                    calls[name].run()
                    runs[name] = _Run([], [], calls[name].ops)
                else:
                    wipe()
                    _time(calls[name], runs[name])
            except Exception as error:
                errors[name] = error
    return {name: run for name, run in runs.items() if name not in errors}, errors


def _time(call: Call, run: _Run) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    call.run()
    run.cpu.append((time.process_time() - cpu) / call.ops)
    run.wall.append((time.perf_counter() - wall) / call.ops)


def _wiping() -> Callable[[], None]:
    """Returns what empties the cache; on a CPU the pool is larger than that."""
    if jax.default_backend() == "cpu":
        return lambda: None
    written = jnp.zeros((WIPE_BYTES // 4,), jnp.float32)
    write = jax.jit(lambda array: array + 1, donate_argnums=0)

    def wipe() -> None:
        nonlocal written
        written = jax.block_until_ready(write(written))

    return wipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for; returns 1 if anything failed."""
    options = _parser().parse_args(arguments)
    specs = [spec for suite in options.suites for spec in suites()[suite]]
    specs = [spec for spec in specs if options.only in spec.name]
    if not specs:
        _parser().error(f"no spec of {options.suites} contains {options.only!r}")
    dtypes = sorted({spec.dtype for spec in specs})
    peaks = {dtype: cost.measured_peaks(dtype) for dtype in dtypes}
    points: list[Point] = []
    print(bench_report.header())
    for spec in specs:
        found = measure(
            spec,
            with_torch(options.implementations),
            rounds=options.rounds,
            seconds=options.seconds,
            peaks=peaks[spec.dtype],
        )
        print(bench_report.rows(found), flush=True)
        points += found
        if options.json:
            bench_report.write_json(options.json, points, peaks)
    # A neighbour that was busy at the start would make every share too large.
    peaks = {d: cost.best_of(peaks[d], cost.measured_peaks(d)) for d in dtypes}
    points = rated(points, peaks)
    print(bench_report.closing(points, peaks))
    if options.json:
        bench_report.write_json(options.json, points, peaks)
    if options.png:
        bench_report.write_png(options.png, points)
    return int(any(point.failure for point in points))


def with_torch(names: Sequence[str]) -> list[str]:
    """Returns the names, and on a CPU the forms of torch, where it is installed."""
    beside = jax.default_backend() == "cpu" and torch_forms.is_installed()
    others = [form for form in torch_forms.FORMS if form not in names]
    return [*names, *(others if beside else [])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lora_kernels.lora_delta.bench", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--suites", nargs="+", choices=suites(), default=["tokens", "smollm2"])
    add("--only", default="", help="run the specs whose name contains this")
    add("--implementations", nargs="+", choices=KNOWN, default=["xla"])
    add("--rounds", type=int, default=20, help="timed calls of each implementation")
    add("--seconds", type=float, default=8.0, help="for the timed calls of one spec")
    add("--json", type=Path, help="write every point, after each spec")
    add("--png", type=Path, help="plot time against tokens; needs the extra bench")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
