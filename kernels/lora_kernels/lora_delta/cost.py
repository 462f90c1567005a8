"""What a workload needs at least, and what the device can do at most."""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lora_kernels.lora_delta.specs import Arrays, Spec

STREAM_BYTES = 256 * 2**20
"""Size of the array that is read to measure bandwidth; larger than any cache."""

PRODUCT_SIZE = 2048
"""Edge of the square product that measures arithmetic."""


class Cost(NamedTuple):
    """Bytes moved and floating-point operations."""

    bytes: float
    flops: float


class Peaks(NamedTuple):
    """Bytes and floating-point operations per second."""

    bytes_per_s: float
    flops_per_s: float


def needed(spec: Spec, arrays: Arrays) -> Cost:
    """Returns the least that the workload must move and compute.

    Counts A and B of the slots that have rows, up to their true ranks, once; x and y of
    adapted rows, y twice; the low-rank intermediate stays on chip.
    """
    rows = np.bincount(arrays.slot[arrays.slot >= 0], minlength=spec.slots)
    per_rank = spec.d_in + np.array(spec.part_widths)  # [p]
    elements_of_slot = (arrays.rank * per_rank).sum(axis=1)
    adapted = int(rows.sum())
    elements = elements_of_slot[rows > 0].sum() + adapted * (
        spec.d_in + 2 * sum(spec.part_widths)
    )
    return Cost(
        bytes=float(elements * arrays.x.dtype.itemsize),
        flops=float(2 * (rows * elements_of_slot).sum()),
    )


def base_cost(spec: Spec, arrays: Arrays) -> Cost:
    """Returns what the base projection itself needs."""
    d_out = sum(spec.part_widths)
    elements = spec.d_in * d_out + spec.tokens * (spec.d_in + d_out)
    flops = 2.0 * spec.tokens * spec.d_in * d_out
    return Cost(float(elements * arrays.x.dtype.itemsize), flops)


def roofline_seconds(cost: Cost, peaks: Peaks) -> float:
    """Returns the time below which the workload cannot run on this device."""
    return max(cost.bytes / peaks.bytes_per_s, cost.flops / peaks.flops_per_s)


def measured_peaks(dtype: str) -> Peaks:
    """Returns what this device reached, just now: a long sum and a large product."""
    stream = jnp.ones((STREAM_BYTES // 4,), jnp.float32)
    square = jnp.ones((PRODUCT_SIZE, PRODUCT_SIZE), dtype)
    read = _fastest(jax.jit(jnp.sum), stream)
    product = _fastest(jax.jit(jnp.matmul), square, square)
    return Peaks(STREAM_BYTES / read, 2 * PRODUCT_SIZE**3 / product)


def _fastest(call: jax.stages.Wrapped, *arguments: jax.Array) -> float:
    jax.block_until_ready(call(*arguments))
    times = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)
