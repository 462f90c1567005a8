"""How long one activation takes, against the bytes that it must move.

    lora-jax bench swap

A model of plain layers with random weights, one manager, many registered adapters
(all of them zeros that share one host copy); adapters take turns in the slots, so that
each activation evicts another and writes a whole slot.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from flax import nnx

from lora_jax.adapters.adapter import take_id
from lora_jax.config import LoRAConfig
from lora_jax.manager.managers import LRUCacheLoRAModelManager


@dataclass(frozen=True)
class SwapResult:
    """Times of one activation.

    Attributes:
      registered: adapters registered on the host.
      slot_bytes: bytes that an activation moves to the device.
      fastest, median: seconds of an activation, its device work included.
      transfer: seconds, the fastest, to move as many bytes in one transfer and no more.
    """

    registered: int
    slot_bytes: int
    fastest: float
    median: float
    transfer: float

    @property
    def ratio(self) -> float:
        """How many times longer than the bare transfer the fastest activation takes."""
        return self.fastest / self.transfer


class Layers(nnx.Module):
    """Square layers, as many and as wide as asked."""

    def __init__(self, layers: int, width: int) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(
            [nnx.Linear(width, width, use_bias=False, rngs=rngs) for _ in range(layers)]
        )


def measure_swaps(
    registered: Sequence[int],
    *,
    layers: int,
    width: int,
    rank: int,
    slots: int,
    repeats: int,
) -> list[SwapResult]:
    """Returns one result for each number of registered adapters, in ascending order.

    Args:
      registered: numbers of adapters on the host; fewer than `slots + 1` are measured
        by taking an adapter out of its slot and putting it back.
      layers: adapted layers. width: their input and output width.
      rank: rank of the adapters and of the slots.
      slots: slots of the bank.
      repeats: activations measured for each number.
    """
    counts = sorted(registered)
    config = LoRAConfig(
        max_loras=slots, max_cpu_loras=max(slots, *counts), max_lora_rank=rank
    )
    manager = LRUCacheLoRAModelManager(Layers(layers, width), config)
    dummy = manager.prepare(manager.create_dummy_lora(take_id(None), rank))
    transfer = _fastest_transfer(manager.memory().slot, repeats)
    results, ids = [], []
    for count in counts:
        while len(ids) < count:
            ids.append(take_id(None))
            adapter = replace(dummy.adapter, id=ids[-1])
            manager.add_prepared(replace(dummy, adapter=adapter))
        times = _activations(manager, ids, repeats)
        results.append(
            SwapResult(
                registered=count,
                slot_bytes=manager.memory().slot,
                fastest=min(times),
                median=statistics.median(times),
                transfer=transfer,
            )
        )
    return results


def _activations(
    manager: LRUCacheLoRAModelManager, ids: Sequence[int], repeats: int
) -> list[float]:
    times = []
    for turn in range(repeats + 2):  # The first two compile.
        id = ids[turn % len(ids)]
        manager.deactivate_adapter(id)
        jax.block_until_ready(manager.bank)
        start = time.perf_counter()
        manager.activate_adapter(id)
        jax.block_until_ready(manager.bank)
        times.append(time.perf_counter() - start)
    return times[2:]


def _fastest_transfer(nbytes: int, repeats: int) -> float:
    source, times = np.ones(nbytes // 4, np.float32), []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(jax.device_put(source.copy()))
        times.append(time.perf_counter() - start)
    return min(times)
