"""What a workload needs at least, and what the device can do at most."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lora_kernels.lora_delta.specs import Spec, ranks_of

STREAM_BYTES = 256 * 2**20
"""Size of the array that is read to measure bandwidth; larger than any cache."""

STREAM_COLUMNS = 4096
"""Length of its rows."""

RUNS = 3
"""Timed calls, of which the fastest counts."""


class Effort(NamedTuple):
    """How much one timed call does.

    Attributes:
      edge: of the square product that measures arithmetic.
      chained: passes over the stream, and products: on an accelerator so many that
        starting the call does not count.
    """

    edge: int
    chained: int


CPU_EFFORT = Effort(edge=2048, chained=2)
ACCELERATOR_EFFORT = Effort(edge=8192, chained=16)


class Cost(NamedTuple):
    """Bytes moved and floating-point operations."""

    bytes: float
    flops: float


class Peaks(NamedTuple):
    """Bytes and floating-point operations per second."""

    bytes_per_s: float
    flops_per_s: float


def needed(spec: Spec, slot: np.ndarray) -> Cost:
    """Returns the least that the workload must move and compute.

    Counts A and B of the slots that have rows, up to their true ranks, once; x and y of
    adapted rows, y twice; the low-rank intermediate stays on chip.

    Args:
      slot: slot of each row, `(tokens,)`.
    """
    rows = _rows_of_slots(spec, slot)
    adapted = int(rows.sum()) * (spec.d_in + 2 * sum(spec.part_widths))
    return Cost(
        bytes=weight_bytes(spec, slot) + float(adapted * _itemsize(spec)),
        flops=float(2 * (rows * _numbers_of_slots(spec)).sum()),
    )


def weight_bytes(spec: Spec, slot: np.ndarray) -> float:
    """Returns the bytes of A and B of the slots that have rows, up to their ranks."""
    used = _rows_of_slots(spec, slot) > 0
    return float(_numbers_of_slots(spec)[used].sum() * _itemsize(spec))


def base_cost(spec: Spec) -> Cost:
    """Returns what the base projection itself needs."""
    d_out = sum(spec.part_widths)
    numbers = spec.d_in * d_out + spec.tokens * (spec.d_in + d_out)
    flops = 2.0 * spec.tokens * spec.d_in * d_out
    return Cost(float(numbers * _itemsize(spec)), flops)


def _rows_of_slots(spec: Spec, slot: np.ndarray) -> np.ndarray:
    return np.bincount(slot[slot >= 0], minlength=spec.slots)


def _numbers_of_slots(spec: Spec) -> np.ndarray:
    """Returns the numbers of A and B that belong to each slot's adapter."""
    per_rank = spec.d_in + np.array(spec.part_widths)  # [parts]
    return (ranks_of(spec) * per_rank).sum(axis=1)


def _itemsize(spec: Spec) -> int:
    return jnp.dtype(spec.dtype).itemsize


def roofline_seconds(cost: Cost, peaks: Peaks) -> float:
    """Returns the time below which the workload cannot run on this device."""
    return max(cost.bytes / peaks.bytes_per_s, cost.flops / peaks.flops_per_s)


def best_of(*peaks: Peaks) -> Peaks:
    """Returns the largest of each number: what the device did at its best moment."""
    return Peaks(*(max(values) for values in zip(*peaks, strict=True)))


def measured_peaks(dtype: str) -> Peaks:
    """Returns what this device reaches, just now: the best of several ways and runs."""
    on_cpu = jax.default_backend() == "cpu"
    edge, chained = CPU_EFFORT if on_cpu else ACCELERATOR_EFFORT
    # Products of bfloat16 into bfloat16 are slow on a CPU.
    product = _wide_product if on_cpu else _product
    square = jnp.full((edge, edge), 1 / edge, dtype)
    rows = STREAM_BYTES // 4 // STREAM_COLUMNS
    stream = jnp.full((rows, STREAM_COLUMNS), 1 / STREAM_COLUMNS, jnp.float32)
    vector = jnp.ones((STREAM_COLUMNS,), jnp.float32)
    seconds_of_read = min(
        _fastest(_project, vector, stream, chained),
        _fastest(_reduce, vector, stream, chained),
        _fastest(_update, stream, vector, chained) / 2,
    )
    return Peaks(
        bytes_per_s=chained * STREAM_BYTES / seconds_of_read,
        flops_per_s=chained * 2 * edge**3 / _fastest(product, square, square, chained),
    )


def _project(vector: Array, stream: Array) -> Array:
    """Reads the stream as a base projection of one row does."""
    return jnp.resize(stream @ vector, vector.shape)


def _reduce(vector: Array, stream: Array) -> Array:
    """Reads the stream for a maximum of each row."""
    return jnp.resize(jnp.max(stream * vector[None, :], axis=1), vector.shape)


def _update(stream: Array, vector: Array) -> Array:
    """Reads the stream and writes it."""
    return stream * vector[None, :]


def _product(value: Array, square: Array) -> Array:
    return value @ square


def _wide_product(value: Array, square: Array) -> Array:
    wide = jnp.matmul(value, square, preferred_element_type=jnp.float32)
    return wide.astype(value.dtype)


def _fastest(
    step: Callable[[Array, Array], Array], carried: Array, other: Array, chained: int
) -> float:
    """Returns the seconds of the fastest of a few runs of successive steps."""

    def steps(carried: Array, other: Array) -> Array:
        return jax.lax.fori_loop(0, chained, lambda _, c: step(c, other), carried)

    call = jax.jit(steps)
    jax.block_until_ready(call(carried, other))
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        jax.block_until_ready(call(carried, other))
        times.append(time.perf_counter() - start)
    return min(times)
