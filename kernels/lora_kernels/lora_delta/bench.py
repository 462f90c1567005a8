"""`python -m lora_kernels.lora_delta.bench`: implementations x specs, timed.

One point is the delta of one site, from (x, y, slot arrays, routing) to y. To see the
kernel and not its dispatch, a pool of argument sets with weights of their own runs in
one jit, each op's input waiting for the op before; the time is divided by the pool. The
implementations take turns within a round, so that a busy neighbour meets all of them.
The base projection of the same sites runs in the same rounds.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lora_kernels import lora_delta, make_routing
from lora_kernels.lora_delta import bench_report, cost, torch_forms
from lora_kernels.lora_delta.api import IMPLEMENTATIONS
from lora_kernels.lora_delta.specs import Arrays, Spec, arrays_of, suites

POOL_BYTES = 64 * 2**20
"""Slot arrays in a pool, at least, so that decode reads them from memory, not cache."""

MOST_SETS = 16
"""Argument sets in a pool, at most: each is unrolled and compiled."""

BASE = "base_projection"
"""Name under which `x @ W` of the same site is timed."""


@dataclass(frozen=True)
class Point:
    """One measured pair of spec and implementation; times are of one op.

    Attributes:
      cpu_us: least processor time of one op, all threads together: on a shared machine
        what neighbours disturb least. Of no meaning on an accelerator.
      refusal: why it did not run; None if it did, and then the times are numbers.
      roofline: share of the roofline reached by the median, of 1.
      base_ratio: median as a share of the base projection's median.
    """

    spec: str
    implementation: str
    tokens: int
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


def pool_of(spec: Spec) -> list[Arrays]:
    """Returns argument sets of one spec that differ in everything but the routing."""
    first = arrays_of(spec)
    sets = -(-POOL_BYTES // (first.a.nbytes + first.b.nbytes))
    count = min(max(int(sets), 2), MOST_SETS)
    others = [arrays_of(spec, seed=seed) for seed in range(1, count)]
    return [first, *(arrays._replace(slot=first.slot) for arrays in others)]


def prepare(implementation: str, spec: Spec, pool: list[Arrays]) -> Callable[[], None]:
    """Returns a function that runs the whole pool once and waits for it.

    Raises:
      NotImplementedError: if the implementation refuses the spec.
      ImportError: if a package that it needs is not installed.
    """
    if implementation in torch_forms.FORMS:
        return torch_forms.prepare(implementation, spec, pool)
    if implementation == BASE:
        step, arguments = jax.jit(_base_chain), _base_arguments(spec, pool)
    else:
        chain = functools.partial(
            _chain, part_widths=spec.part_widths, implementation=implementation
        )
        sets = [tuple(map(jnp.asarray, (*args[:6], args.weight))) for args in pool]
        step, arguments = jax.jit(chain), (jnp.asarray(pool[0].slot), sets)
    compiled = step.lower(*arguments).compile()
    return lambda: jax.block_until_ready(compiled(*arguments)) and None


def _base_arguments(
    spec: Spec, pool: list[Arrays]
) -> tuple[list[jax.Array], list[jax.Array]]:
    rng = np.random.default_rng(0)
    shape = (spec.d_in, sum(spec.part_widths))
    kernel = rng.standard_normal(shape, dtype=np.float32)
    kernels = [jnp.asarray(kernel * k, spec.dtype) for k in range(1, len(pool) + 1)]
    return [jnp.asarray(arrays.x) for arrays in pool], kernels


def _chain(
    slot: jax.Array,
    sets: list[tuple[jax.Array, ...]],
    *,
    part_widths: tuple[int, ...],
    implementation: str,
) -> list[jax.Array]:
    outs, after = [], jnp.float32(0)
    for x, y, a, b, scale, rank, weight in sets:
        routing = make_routing(slot, a.shape[0], weight=weight)
        x = x + after.astype(x.dtype)
        outs.append(
            lora_delta(
                x, y, a, b, scale=scale, rank=rank, routing=routing,
                part_widths=part_widths, implementation=implementation,
            )
        )  # fmt: skip
        after = _waits_for(outs[-1])
    return outs


def _base_chain(xs: list[jax.Array], kernels: list[jax.Array]) -> list[jax.Array]:
    outs, after = [], jnp.float32(0)
    for x, kernel in zip(xs, kernels, strict=True):
        outs.append((x + after.astype(x.dtype)) @ kernel)
        after = _waits_for(outs[-1])
    return outs


def _waits_for(out: jax.Array) -> jax.Array:
    """Returns a zero that XLA cannot compute before `out`."""
    return jnp.where(jnp.isnan(out[0, 0]), 1.0, 0.0).astype(jnp.float32)


def measure(
    spec: Spec, implementations: Sequence[str], *, rounds: int, peaks: cost.Peaks
) -> list[Point]:
    """Returns one point for each implementation and for the base projection."""
    pool = pool_of(spec)
    calls: dict[str, Callable[[], None]] = {}
    points: list[Point] = []
    for name in [BASE, *implementations]:
        try:
            calls[name] = prepare(name, spec, pool)
            calls[name]()  # first calls allocate
        except (NotImplementedError, ImportError) as refusal:
            points.append(Point(spec.name, name, spec.tokens, refusal=str(refusal)))
    seconds = _timed_rounds(calls, rounds, len(pool))
    base = float(np.median(seconds[BASE].wall))
    needs = cost.needed(spec, pool[0])
    for name, times in seconds.items():
        median, least_wall, p10, p90 = np.percentile(times.wall, [50, 0, 10, 90])
        least = cost.base_cost(spec, pool[0]) if name == BASE else needs
        points.append(
            Point(
                spec=spec.name,
                implementation=name,
                tokens=spec.tokens,
                median_us=float(median * 1e6),
                min_us=float(least_wall * 1e6),
                cpu_us=min(times.cpu) * 1e6,
                p10_us=float(p10 * 1e6),
                p90_us=float(p90 * 1e6),
                bytes=least.bytes,
                flops=least.flops,
                roofline=float(cost.roofline_seconds(least, peaks) / median),
                base_ratio=float(median / base),
            )
        )
    return points


class _Times(NamedTuple):
    """Seconds of one op, one number a round."""

    wall: list[float]
    cpu: list[float]


def _timed_rounds(
    calls: dict[str, Callable[[], None]], rounds: int, ops: int
) -> dict[str, _Times]:
    times = {name: _Times([], []) for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            times[name].cpu.append((time.process_time() - cpu) / ops)
            times[name].wall.append((time.perf_counter() - wall) / ops)
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for; returns the exit code."""
    options = _parser().parse_args(arguments)
    specs = [spec for suite in options.suites for spec in suites()[suite]]
    specs = [spec for spec in specs if options.only in spec.name]
    if not specs:
        _parser().error(f"no spec of {options.suites} contains {options.only!r}")
    peaks = {
        dtype: cost.measured_peaks(dtype)
        for dtype in sorted({spec.dtype for spec in specs})
    }
    points: list[Point] = []
    print(bench_report.header())
    for spec in specs:
        found = measure(
            spec,
            options.implementations,
            rounds=options.rounds,
            peaks=peaks[spec.dtype],
        )
        print(bench_report.rows(found), flush=True)
        points += found
        if options.json:
            bench_report.write_json(options.json, points, peaks)
    if options.png:
        bench_report.write_png(options.png, points)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lora_kernels.lora_delta.bench", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    known = [*IMPLEMENTATIONS, *torch_forms.FORMS]
    add("--suites", nargs="+", choices=suites(), default=["tokens", "smollm2"])
    add("--only", default="", help="run the specs whose name contains this")
    add("--implementations", nargs="+", choices=known, default=["xla", *known[-2:]])
    add("--rounds", type=int, default=20, help="timed runs of each implementation")
    add("--json", type=Path, help="write every point, after each spec")
    add("--png", type=Path, help="plot time against tokens; needs matplotlib")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
