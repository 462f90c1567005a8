"""`python -m lora_kernels.grouped_dot.bench`: implementations x specs, timed.

One point is one grouped product, from x, kernels and each pair's expert to the pairs'
outputs. Beside the implementations run `jax.lax.ragged_dot` over sorted rows, and the
product of every row with every expert, which a grouped product is there to avoid. All
take turns within a round, so that a busy neighbour meets all of them.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lora_kernels import Routing, grouped_dot, make_routing
from lora_kernels.grouped_dot.api import IMPLEMENTATIONS


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One workload: every row has `per_row` different experts, drawn evenly."""

    name: str
    rows: int
    per_row: int
    experts: int
    d_in: int
    d_out: int
    dtype: str = "float32"


@dataclass(frozen=True)
class Point:
    """One measured pair of spec and implementation.

    Attributes:
      median_ms, min_ms: time of one product.
      refusal: why it did not run; None if it did, and then the times are numbers.
    """

    spec: str
    implementation: str
    median_ms: float | None = None
    min_ms: float | None = None
    refusal: str | None = None


MODELS = {
    "olmoe-1b-7b": {"experts": 64, "per_row": 8, "d_in": 2048, "d_out": 1024},
    "mixtral-small": {"experts": 8, "per_row": 2, "d_in": 2048, "d_out": 2048},
    "qwen3-30b-a3b": {"experts": 128, "per_row": 8, "d_in": 2048, "d_out": 768},
}
"""Down or up projections of the sizes that models have; Mixtral's made smaller."""


def specs(model: str, rows: Sequence[int], dtype: str) -> list[Spec]:
    """Returns the workload of a model at each number of rows."""
    return [
        Spec(name=f"{model}/t{count}", rows=count, dtype=dtype, **MODELS[model])
        for count in rows
    ]


def ragged_dot(x: jax.Array, kernel: jax.Array, pairs: Routing) -> jax.Array:
    """Returns the same by JAX's own product, if all pairs have an expert."""
    per_row = pairs.slot.shape[0] // x.shape[0]
    out = jax.lax.ragged_dot(x[pairs.order // per_row], kernel, pairs.counts)
    return out[pairs.position]


def every_expert(x: jax.Array, kernel: jax.Array, pairs: Routing) -> jax.Array:
    """Returns the same by computing all rows with all experts."""
    per_row = pairs.slot.shape[0] // x.shape[0]
    out = jnp.einsum("ti,eio->teo", x, kernel)
    return out[jnp.arange(pairs.slot.shape[0]) // per_row, pairs.slot]


BASELINES = {"ragged_dot": ragged_dot, "every_expert": every_expert}
"""Name -> what else there is."""


def arguments_of(spec: Spec) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns x, the kernels, and the expert of each pair."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((spec.rows, spec.d_in), dtype=np.float32)
    kernel = rng.standard_normal(
        (spec.experts, spec.d_in, spec.d_out), dtype=np.float32
    )
    chosen = rng.permuted(np.tile(np.arange(spec.experts), (spec.rows, 1)), axis=1)
    return (
        jnp.asarray(x, spec.dtype),
        jnp.asarray(kernel, spec.dtype),
        jnp.asarray(chosen[:, : spec.per_row].reshape(-1), jnp.int32),
    )


def prepare(implementation: str, spec: Spec) -> Callable[[], None]:
    """Returns a function that computes one product and waits for it.

    Raises:
      NotImplementedError: if the implementation refuses the spec.
    """
    product = BASELINES.get(
        implementation, functools.partial(grouped_dot, implementation=implementation)
    )

    def step(x: jax.Array, kernel: jax.Array, group: jax.Array) -> jax.Array:
        return product(x, kernel, make_routing(group, spec.experts))

    arguments = arguments_of(spec)
    compiled = jax.jit(step).lower(*arguments).compile()

    def run() -> None:
        jax.block_until_ready(compiled(*arguments))

    return run


def measure(spec: Spec, implementations: Sequence[str], rounds: int) -> list[Point]:
    """Returns one point for each implementation."""
    calls: dict[str, Callable[[], None]] = {}
    points = []
    for name in implementations:
        try:
            calls[name] = prepare(name, spec)
            calls[name]()  # first calls allocate
        except NotImplementedError as refusal:
            points.append(Point(spec.name, name, refusal=str(refusal)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return points + [
        Point(spec.name, name, float(np.median(ms)), min(ms))
        for name, ms in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for; returns the exit code."""
    options = _parser().parse_args(arguments)
    points: list[Point] = []
    for model in options.models:
        for spec in specs(model, options.rows, options.dtype):
            found = measure(spec, options.implementations, options.rounds)
            for point in found:
                print(_line(point), flush=True)
            points += found
    if options.json:
        where = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        result = where | {"points": [asdict(point) for point in points]}
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 0


def _line(point: Point) -> str:
    head = f"{point.spec:24} {point.implementation:14}"
    if point.median_ms is None:
        return f"{head} {point.refusal}"
    return f"{head} median {point.median_ms:9.2f} ms  least {point.min_ms:9.2f} ms"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lora_kernels.grouped_dot.bench", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    known = [*IMPLEMENTATIONS, *BASELINES]
    add("--models", nargs="+", choices=MODELS, default=["olmoe-1b-7b"])
    add("--rows", nargs="+", type=int, default=[1, 8, 64, 512])
    add("--dtype", default="float32")
    add("--implementations", nargs="+", choices=known, default=["xla", *BASELINES])
    add("--rounds", type=int, default=5, help="timed runs of each implementation")
    add("--json", type=Path, help="write every point")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
