"""An op and an implementation of it -> how far its numbers are from `reference`'s.

Imported by `gpu_check.py`. Values and gradients; base rows must be exact.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lora_kernels import (
    Routing,
    grouped_dot,
    lora_delta,
    lora_experts,
    make_routing,
)
from lora_kernels.grouped_dot.api import IMPLEMENTATIONS as GROUPED
from lora_kernels.lora_delta import bench_report, reference
from lora_kernels.lora_delta.api import IMPLEMENTATIONS
from lora_kernels.lora_delta.specs import Arrays, Spec, arrays_of

COMPARED = tuple(name for name in IMPLEMENTATIONS if name != "reference")

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest error by dtype, relative to the larger of 1 and the number itself; of a
gradient, relative to the largest number of its array."""

CHOSEN = 3
"""Experts of a token; it divides the rows of every spec here."""

GRADIENTS = ("x", "a", "b", "scale", "weight")

Run = Callable[[Spec, Arrays, str], dict[str, np.ndarray]]
"""Named results of an implementation; of `values`, base rows keep y."""


def quick_specs() -> Iterator[Spec]:
    """One small site for the decode kernel and one for those of many rows."""
    for tokens, ranks in [(33, (16, 0, 7)), (300, (8, 64, 0, 33))]:
        yield _check(4096, (4096, 1024, 1024), tokens, ranks, "bfloat16")


def long_specs() -> Iterator[Spec]:
    """Small sites: unaligned, parts absent, one rank block and several; every dtype."""
    shapes = [(96, (64, 32, 8)), (577, (577, 190)), (4096, (4096, 1024, 1024))]
    for dtype in TOLERANCE:
        for d_in, widths in shapes if dtype == "bfloat16" else shapes[1:2]:
            for tokens, ranks in [(33, (16, 0, 7)), (300, (8, 64, 0, 33))]:
                yield _check(d_in, widths, tokens, ranks, dtype)


def tiny_specs() -> Iterator[Spec]:
    """One site that takes no time, to try the script."""
    yield _check(24, (16, 8), 9, (4, 0, 3), "float32")


def _check(
    d_in: int, widths: tuple[int, ...], tokens: int, ranks: tuple[int, ...], dtype: str
) -> Spec:
    return Spec(
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
    """Returns the largest errors of an implementation, or why it has no numbers."""
    entry: dict[str, object] = {
        "op": run.__name__, "spec": spec.name, "implementation": name
    }  # fmt: skip
    try:
        arrays = arrays_of(spec)
        got = run(spec, arrays, name)
        want = run(spec, arrays, "reference")
    except (NotImplementedError, ImportError) as refusal:
        return entry | {"refusal": str(refusal)}
    except Exception as error:
        return entry | {"failure": bench_report.failure_text(error), "passed": False}
    errors = {key: _error(key, got[key], want[key]) for key in got}
    base = arrays.slot < 0
    exact = all(
        np.array_equal(got[key][base], want[key][base])
        for key in ("values", "x", "weight")
        if key in got and len(got[key]) == len(base)
    )
    passed = exact and max(errors.values()) <= TOLERANCE[spec.dtype]
    return entry | {"errors": errors, "base_exact": exact, "passed": passed}


def _error(key: str, got: np.ndarray, want: np.ndarray) -> float:
    wide = want.astype(np.float64)
    size = np.maximum(np.abs(wide) if key == "values" else np.abs(wide).max(), 1)
    error = np.abs(got.astype(np.float64) - wide) / size
    return float(np.nan_to_num(error, nan=np.inf).max(initial=0))


def delta(spec: Spec, arrays: Arrays, implementation: str) -> dict[str, np.ndarray]:
    """Runs `lora_delta` on a workload."""
    out = lora_delta(
        *(jnp.asarray(array) for array in arrays[:4]),
        scale=jnp.asarray(arrays.scale),
        rank=jnp.asarray(arrays.rank),
        routing=routing_of(arrays),
        part_widths=spec.part_widths,
        implementation=implementation,
    )
    return {"values": np.asarray(out)}


def experts(spec: Spec, arrays: Arrays, implementation: str) -> dict[str, np.ndarray]:
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
    return {"values": np.asarray(out)}


def grouped(spec: Spec, arrays: Arrays, implementation: str) -> dict[str, np.ndarray]:
    """Runs `grouped_dot`: A as kernels, rows in turn share one of x."""
    x, kernel = jnp.asarray(arrays.x), jnp.asarray(arrays.a[:, 0])
    out = grouped_dot(
        x[: spec.tokens // CHOSEN],
        kernel.swapaxes(1, 2),
        routing_of(arrays),
        implementation=implementation,
    )
    return {"values": np.asarray(out)}


def gradients(spec: Spec, arrays: Arrays, implementation: str) -> dict[str, np.ndarray]:
    """Returns the gradients of `lora_delta` for a random cotangent.

    Those of `reference` are JAX's own, not those of the op's backward pass, and of the
    same numbers in float32, where its products are exact.
    """
    floats = [getattr(arrays, name) for name in ("x", "y", "a", "b", "scale", "weight")]
    op = functools.partial(lora_delta, implementation=implementation)
    if implementation == "reference":
        floats, op = [each.astype(np.float32) for each in floats], reference.lora_delta
    rng = np.random.default_rng(1)
    cotangent = rng.standard_normal(arrays.y.shape, dtype=np.float32)
    cotangent = jnp.asarray(cotangent.astype(arrays.y.dtype).astype(np.float32))
    routing, rank = routing_of(arrays), jnp.asarray(arrays.rank)

    def loss(
        x: Array, y: Array, a: Array, b: Array, scale: Array, weight: Array
    ) -> Array:
        out = op(
            x, y, a, b, scale=scale, rank=rank, part_widths=spec.part_widths,
            routing=dataclasses.replace(routing, weight=weight),
        )  # fmt: skip
        return jnp.sum(out.astype(jnp.float32) * cotangent)

    found = jax.jit(jax.grad(loss, argnums=(0, 2, 3, 4, 5)))(*map(jnp.asarray, floats))
    return dict(zip(GRADIENTS, map(np.asarray, found), strict=True))


def routing_of(arrays: Arrays) -> Routing:
    """Returns the routing of a workload's rows."""
    slots, weight = arrays.a.shape[0], jnp.asarray(arrays.weight)
    return make_routing(jnp.asarray(arrays.slot), slots, weight=weight)


RUNS: tuple[tuple[Run, str], ...] = (
    *itertools.product((delta, gradients, experts), COMPARED),
    *((grouped, name) for name in GROUPED if name != "reference"),
)
"""What is compared: an op and an implementation of it."""
