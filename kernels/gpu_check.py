"""`python kernels/gpu_check.py OUT.json`: what only a real GPU can say, in minutes.

Needs the repository and an installed JAX for CUDA with Triton and jax-triton; nothing
else, and no network. jax-triton may also be a wheel that is not installed: `--wheel`.
Four stages, each with a time of its own, so that headlines are there in five minutes:

    a  every GPU implementation of every op against `reference`, values and gradients,
       on few sites
    b  headline points, Llama-3-8B sites in bfloat16, and the write of one adapter
    c  the same as a on more sites, in every dtype
    d  the headline points with every implementation, then the benchmark's suites

The JSON is written anew after every point, so a run that is cut off keeps what it has.
What fails is told and the rest goes on; the exit code is 1 if anything failed, or if on
a GPU every Triton kernel was refused.
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np

import gpu_numbers
from lora_kernels.lora_delta import bench, bench_report, cost
from lora_kernels.lora_delta.specs import Spec, site_specs
from lora_kernels.lora_delta.suites import suites

HEADLINE_TIMED = ("triton",)
"""What stage b times beside the base projection: what runs by default."""

TIMED = tuple(name for name in gpu_numbers.COMPARED if name != "xla_partitioned")
"""What stage d times. `xla_partitioned` is for slots on several cards; on one, `xla`
does the same in less time."""

HEADLINES = (
    ("one-row", 1, "identical", (16,)),
    ("b32-one-adapter", 32, "identical", (16,)),
    ("b32-distinct", 32, "distinct", (16,)),
    ("b128-distinct", 128, "distinct", (16,)),
    ("prefill-8192", 8192, "skewed", (16,)),
    ("b32-distinct-r64", 32, "distinct", (64,)),
    ("b32-mixed-ranks", 32, "distinct", (8, 16, 32, 64)),
    ("b32-half-base", 32, "half_base", (16,)),
    ("b32-base", 32, "all_base", (16,)),
    ("b256-zipf", 256, "zipf", (16,)),
    ("prefill-2048", 2048, "uniform", (16,)),
    ("prefill-8192-r64", 8192, "skewed", (64,)),
)
"""Name, rows, distribution and ranks of the points of stage b, the first ones first."""

PREFILL_SLOTS, MOST_SLOTS = 8, 128

SECONDS = {"a": 60.0, "b": 200.0, "c": 120.0, "d": float("inf")}
"""Of each stage, at most. A point that has begun is finished."""

POINT_SECONDS = 2.0
"""For the timed calls of one spec."""


class Plan(NamedTuple):
    """What the stages run, and the numbers of the adapter that is written."""

    quick: Sequence[Spec]
    headlines: Sequence[Spec]
    long: Sequence[Spec]
    grid: Sequence[Spec]
    adapter_numbers: int


def full_plan() -> Plan:
    """Returns what a card is asked."""
    headlines = tuple(headline_specs())
    return Plan(
        quick=tuple(gpu_numbers.quick_specs()),
        headlines=headlines,
        long=tuple(gpu_numbers.long_specs()),
        grid=(*headlines, *(spec for suite in suites().values() for spec in suite)),
        adapter_numbers=83_886_080 // 2,  # r=16 at every linear of Llama-3-8B
    )


def tiny_plan() -> Plan:
    """Returns the least that runs every stage, to try the script on any machine."""
    (spec,) = tiny = tuple(gpu_numbers.tiny_specs())
    timed = (dataclasses.replace(spec, name="tiny"),)
    return Plan(tiny, timed, tiny, timed, adapter_numbers=1024)


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


def swap_seconds(numbers: int) -> dict[str, object]:
    """Seconds to put one adapter of so many numbers into a slot, in its two steps."""
    slots = 32
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
        """Appends entries, and writes the file."""
        self.content.setdefault(key, []).extend(entries)
        self.write()

    def write(self) -> None:
        """Writes the file."""
        self.content["faults"] = self.faults()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")

    def faults(self) -> list[str]:
        """Returns one line for each wrong number and each failure."""
        kinds = ("checks", "swap", "points", "stages")
        entries = [entry for kind in kinds for entry in self.content.get(kind, [])]
        return [
            " ".join(
                str(entry[k]) for k in ("op", "spec", "implementation") if k in entry
            )
            + f": {entry.get('failure') or entry.get('errors')}"
            for entry in entries
            if entry.get("failure") or entry.get("passed") is False
        ] + self._refused_triton()

    def _refused_triton(self) -> list[str]:
        """Returns a line if this is a GPU and no Triton kernel has run on it."""
        entries = self.content.get("checks", []) + self.content.get("points", [])
        triton = [e for e in entries if e["implementation"].startswith("triton")]
        on_gpu = self.content["environment"]["platform"] == "gpu"
        if on_gpu and triton and all(entry.get("refusal") for entry in triton):
            return [f"every Triton kernel was refused: {triton[0]['refusal']}"]
        return []


class Clock:
    """How long a stage may go on."""

    def __init__(self, seconds: float, end: float):
        self.start = time.monotonic()
        self.stop = min(self.start + seconds, end)

    def within(self, items: Iterable) -> Iterator:
        """Yields items until the time is over."""
        for item in items:
            if time.monotonic() >= self.stop:
                return
            yield item


def check_all(record: Record, clock: Clock, specs: Sequence[Spec]) -> None:
    """Stages a and c."""
    pairs = [(spec, *run) for spec in specs for run in gpu_numbers.RUNS]
    for spec, run, name in clock.within(pairs):
        entry = gpu_numbers.check(spec, name, run)
        print(entry, flush=True)
        record.add("checks", [entry])


def measure_all(
    record: Record,
    clock: Clock,
    specs: Sequence[Spec],
    names: Sequence[str],
    rounds: int,
) -> None:
    """Times specs; the shares of the roofline are by the best peaks so far."""
    peaks = {dtype: _peaks(record, dtype) for dtype in {spec.dtype for spec in specs}}
    print(bench_report.header())
    for spec in clock.within(specs):
        found = bench.measure(
            spec,
            names,
            rounds=rounds,
            seconds=POINT_SECONDS,
            peaks=peaks[spec.dtype],
        )
        print(bench_report.rows(found), flush=True)
        record.add("points", [dataclasses.asdict(point) for point in found])
    peaks = {d: cost.best_of(peaks[d], _peaks(record, d)) for d in peaks}
    points = [bench.Point(**point) for point in record.content.get("points", [])]
    known = [point for point in points if point.dtype in peaks]
    print(bench_report.closing(bench.rated(known, peaks), peaks), flush=True)


def _peaks(record: Record, dtype: str) -> cost.Peaks:
    """Returns the peaks of now, or of earlier where those were higher."""
    earlier = [
        cost.Peaks(entry["bytes_per_s"], entry["flops_per_s"])
        for entry in record.content.get("peaks", [])
        if entry.get("dtype") == dtype and "bytes_per_s" in entry
    ]
    now = cost.measured_peaks(dtype)
    record.add("peaks", [{"dtype": dtype} | now._asdict()])
    return cost.best_of(now, *earlier)


def guarded(record: Record, key: str, action: Callable[[], dict[str, object]]) -> None:
    """Adds what an action returns, or its failure."""
    try:
        entry = action()
    except Exception as error:
        entry = {"op": key, "failure": bench_report.failure_text(error)}
    record.add(key, [entry])


def _run_stage(
    name: str, stage: Callable[[Clock], None], clock: Clock
) -> dict[str, object]:
    stage(clock)
    return {"stage": name, "seconds": time.monotonic() - clock.start}


def use_wheel(path: Path) -> None:
    """Makes the packages of a pure Python wheel importable, before installed ones.

    Raises:
      ValueError: if there is no such file, or it is no pure Python wheel.
    """
    if not path.is_file() or not path.name.endswith("-none-any.whl"):
        raise ValueError(f"--wheel {path}: expected the file of a pure Python wheel")
    sys.path.insert(0, str(path.resolve()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the stages; returns 1 if anything failed."""
    parser = argparse.ArgumentParser(description="What only a real GPU can say.")
    parser.add_argument("out", type=Path, help="JSON file")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all stages")
    parser.add_argument("--rounds", type=int, default=50, help="timed calls a point")
    parser.add_argument("--stages", default="abcd")
    parser.add_argument("--wheel", type=Path, action="append", default=[])
    parser.add_argument("--tiny", action="store_true", help="try the script itself")
    options = parser.parse_args(arguments)
    for wheel in options.wheel:
        use_wheel(wheel)
    end = time.monotonic() + options.seconds
    record = Record(options.out)
    record.write()
    plan = tiny_plan() if options.tiny else full_plan()
    rounds = options.rounds

    def headlines(clock: Clock) -> None:
        guarded(record, "swap", lambda: swap_seconds(plan.adapter_numbers))
        measure_all(record, clock, plan.headlines, HEADLINE_TIMED, rounds)

    stages: dict[str, Callable[[Clock], None]] = {
        "a": lambda clock: check_all(record, clock, plan.quick),
        "b": headlines,
        "c": lambda clock: check_all(record, clock, plan.long),
        "d": lambda clock: measure_all(record, clock, plan.grid, TIMED, rounds),
    }
    for name, stage in stages.items():
        if name in options.stages:
            clock = Clock(SECONDS[name], end)
            guarded(record, "stages", functools.partial(_run_stage, name, stage, clock))
    faults = record.faults()
    print(*faults, sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
