"""`python kernels/gpu_check.py OUT.json`: what only a real GPU can say, in minutes.

Needs the repository and an installed JAX for CUDA with Triton and jax-triton; nothing
else, and no network. Three stages, most important first:

    a  every GPU implementation of every op against `reference`: numbers, base rows bit
       for bit
    b  headline points, Llama-3-8B sites in bfloat16, and the write of one adapter
    c  the grid of the benchmark's suites, while time remains

The JSON is written anew after every point, so a run that is cut off keeps what it has.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np

from lora_kernels import (
    Routing,
    grouped_dot,
    lora_delta,
    lora_experts,
    make_routing,
)
from lora_kernels.grouped_dot.api import IMPLEMENTATIONS as GROUPED
from lora_kernels.lora_delta import bench, bench_report, cost
from lora_kernels.lora_delta.api import IMPLEMENTATIONS
from lora_kernels.lora_delta.specs import Arrays, Spec, arrays_of, site_specs, suites

COMPARED = tuple(name for name in IMPLEMENTATIONS if name != "reference")

TIMED = tuple(name for name in COMPARED if name != "xla_partitioned")
"""That one is for slots on several cards; on one, `xla` does the same in less time."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest error by dtype, relative to the larger of 1 and the number itself."""

HEADLINES = (
    ("one-row", 1, "identical", (16,)),
    ("b32-one-adapter", 32, "identical", (16,)),
    ("b32-distinct", 32, "distinct", (16,)),
    ("b128-distinct", 128, "distinct", (16,)),
    ("b32-distinct-r64", 32, "distinct", (64,)),
    ("b32-mixed-ranks", 32, "distinct", (8, 16, 32, 64)),
    ("b32-half-base", 32, "half_base", (16,)),
    ("b32-base", 32, "all_base", (16,)),
    ("b256-zipf", 256, "zipf", (16,)),
    ("prefill-2048", 2048, "uniform", (16,)),
    ("prefill-8192", 8192, "skewed", (16,)),
    ("prefill-8192-r64", 8192, "skewed", (64,)),
)
"""Name, rows, distribution and ranks of the points of stage b."""

PREFILL_SLOTS, MOST_SLOTS = 8, 128


CHOSEN = 3
"""Experts of a token in stage a; it divides the rows of every spec there."""

Run = Callable[[Spec, Arrays, str], np.ndarray]


def correctness_specs() -> Iterator[Spec]:
    """Small sites: unaligned, parts absent, one rank block and several."""
    shapes = [(96, (64, 32, 8)), (577, (577, 190)), (4096, (4096, 1024, 1024))]
    for dtype in TOLERANCE:
        for d_in, widths in shapes if dtype == "bfloat16" else shapes[1:2]:
            for tokens, ranks in [(33, (16, 0, 7)), (300, (8, 64, 0, 33))]:
                yield Spec(
                    name=f"check/{dtype}-{d_in}-t{tokens}-r{max(ranks)}",
                    tokens=tokens,
                    slots=5,
                    d_in=d_in,
                    part_widths=widths,
                    ranks=ranks,
                    distribution="half_base",
                    dtype=dtype,
                )


def check(spec: Spec, name: str, run: Run) -> dict[str, object]:
    """Returns the largest error of an implementation, or why it refused."""
    arrays = arrays_of(spec)
    entry: dict[str, object] = {"spec": spec.name, "implementation": name}
    try:
        got, want = run(spec, arrays, name), run(spec, arrays, "reference")
    except NotImplementedError as refusal:
        return entry | {"refusal": str(refusal)}
    wide = want.astype(np.float64)
    error = np.abs(got.astype(np.float64) - wide) / np.maximum(np.abs(wide), 1)
    base = arrays.slot < 0
    exact = np.array_equal(got[base], want[base])
    largest = float(np.nan_to_num(error, nan=np.inf).max(initial=0))
    passed = exact and largest <= TOLERANCE[spec.dtype]
    return entry | {"error": largest, "base_exact": exact, "passed": passed}


def delta(spec: Spec, arrays: Arrays, implementation: str) -> np.ndarray:
    """Runs `lora_delta` on a workload."""
    out = lora_delta(
        *(jnp.asarray(array) for array in arrays[:4]),
        scale=jnp.asarray(arrays.scale),
        rank=jnp.asarray(arrays.rank),
        routing=routing_of(arrays),
        part_widths=spec.part_widths,
        implementation=implementation,
    )
    return np.asarray(out)


def experts(spec: Spec, arrays: Arrays, implementation: str) -> np.ndarray:
    """Runs `lora_experts`: rows in turn share one of x, slots are experts of one."""
    x, y, *bank = (jnp.asarray(array) for array in arrays[:6])
    a, b, scale, rank = (array[None] for array in bank)
    out = lora_experts(
        x[: spec.tokens // CHOSEN],
        y,
        a,
        b,
        scale=scale,
        rank=rank,
        routing=routing_of(arrays),
        part_widths=spec.part_widths,
        implementation=implementation,
    )
    return np.asarray(out)


def grouped(spec: Spec, arrays: Arrays, implementation: str) -> np.ndarray:
    """Runs `grouped_dot`: A as kernels, rows in turn share one of x."""
    x, kernel = jnp.asarray(arrays.x), jnp.asarray(arrays.a[:, 0])
    return np.asarray(
        grouped_dot(
            x[: spec.tokens // CHOSEN],
            kernel.swapaxes(1, 2),
            routing_of(arrays),
            implementation=implementation,
        )
    )


RUNS = (
    *itertools.product((delta, experts), COMPARED),
    *((grouped, name) for name in GROUPED if name != "reference"),
)
"""What stage a runs: an op and an implementation of it."""


def routing_of(arrays: Arrays) -> Routing:
    """Returns the routing of a workload's rows."""
    slots, weight = arrays.a.shape[0], jnp.asarray(arrays.weight)
    return make_routing(jnp.asarray(arrays.slot), slots, weight=weight)


def headline_specs() -> Iterator[Spec]:
    """The points of stage b at each fused site of Llama-3-8B."""
    for name, tokens, distribution, ranks in HEADLINES:
        workload = Spec(
            name=name,
            tokens=tokens,
            slots=PREFILL_SLOTS if tokens > 256 else MOST_SLOTS,
            ranks=ranks,
            distribution=distribution,
            dtype="bfloat16",
        )
        yield from site_specs("llama-3-8b", workload)


def swap_seconds() -> dict[str, float]:
    """Seconds to put one r=16 adapter of Llama-3-8B into a slot, in its two steps."""
    numbers, slots = 83_886_080 // 2, 32
    host = np.ones(numbers, jnp.bfloat16)
    write = jax.jit(
        lambda bank, slot, one: jax.lax.dynamic_update_index_in_dim(bank, one, slot, 0),
        donate_argnums=0,
    )
    bank = write(jnp.zeros((slots, numbers), jnp.bfloat16), 0, jnp.asarray(host))
    copied, written = [], []
    for slot in range(10):
        start = time.perf_counter()
        one = jax.block_until_ready(jax.device_put(host))
        middle = time.perf_counter()
        bank = jax.block_until_ready(write(bank, slot, one))
        copied.append(middle - start)
        written.append(time.perf_counter() - middle)
    return {"copy_s": float(np.median(copied)), "write_s": float(np.median(written))}


class Record:
    """What has been found so far, in memory and in the file."""

    def __init__(self, path: Path):
        self.path = path
        self.content: dict = {"environment": bench_report.environment()}

    def add(self, key: str, entries: Sequence[dict]) -> None:
        """Appends entries and writes the file."""
        self.content.setdefault(key, []).extend(entries)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")

    @property
    def failed(self) -> bool:
        """Whether a number was wrong."""
        checks = self.content.get("checks", [])
        return any(entry.get("passed") is False for entry in checks)


def check_all(record: Record) -> None:
    """Stage a."""
    for spec in correctness_specs():
        for run, name in RUNS:
            entry = {"op": run.__name__} | check(spec, name, run)
            print(entry, flush=True)
            record.add("checks", [entry])


def measure_all(
    record: Record, specs: Sequence[Spec], *, rounds: int, stop: float
) -> None:
    """Measures specs until the clock says `stop`."""
    peaks = {d: cost.measured_peaks(d) for d in sorted({spec.dtype for spec in specs})}
    record.add("peaks", [{"dtype": d} | peaks[d]._asdict() for d in peaks])
    print(bench_report.header())
    for spec in specs:
        if time.monotonic() < stop:
            found = bench.measure(spec, TIMED, rounds=rounds, peaks=peaks[spec.dtype])
            print(bench_report.rows(found), flush=True)
            record.add("points", [dataclasses.asdict(point) for point in found])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the stages; returns 1 if a number is wrong."""
    parser = argparse.ArgumentParser(description="What only a real GPU can say.")
    parser.add_argument("out", type=Path, help="JSON file")
    parser.add_argument("--seconds", type=float, default=540, help="for all stages")
    parser.add_argument("--rounds", type=int, default=50, help="timed rounds a point")
    parser.add_argument("--stages", default="abc")
    options = parser.parse_args(arguments)
    stop = time.monotonic() + options.seconds
    record = Record(options.out)
    if "a" in options.stages:
        check_all(record)
    if "b" in options.stages:
        record.add("swap", [swap_seconds()])
        headlines = list(headline_specs())
        measure_all(record, headlines, rounds=options.rounds, stop=stop)
    if "c" in options.stages:
        grid = [spec for suite in suites().values() for spec in suite]
        measure_all(record, grid, rounds=options.rounds, stop=stop)
    return int(record.failed)


if __name__ == "__main__":
    sys.exit(main())
