"""A workload -> its argument sets, drawn on the device.

The sets differ in A and B, so that these come from memory as in a model of many layers.
x, y and the routing are shared: what the layer before has just written is in cache, and
a routing is made once a step.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from lora_kernels import make_routing
from lora_kernels.lora_delta import cost
from lora_kernels.lora_delta.specs import Spec, ranks_of, slots_of_rows
from lora_kernels.routing import Routing


class Sizes(NamedTuple):
    """How much one call works through.

    Attributes:
      read_bytes: of A and B that the sets' ops read, so that caches cannot hold them.
      bank_bytes: of the sets' slot arrays at most, used or not.
      sets: most argument sets.
      ops: fewest ops, over the sets in turn.
    """

    read_bytes: int
    bank_bytes: int
    sets: int
    ops: int


CPU_SIZES = Sizes(read_bytes=2**26, bank_bytes=2**30, sets=16, ops=2)
"""Up to twice the cache of the processor that was measured; short calls."""

ACCELERATOR_SIZES = Sizes(read_bytes=2**29, bank_bytes=2**34, sets=32, ops=32)
"""Ten times the cache of an H200; calls that are long beside their start."""


class Pool(NamedTuple):
    """The argument sets of one workload, on the device.

    Attributes:
      banks: A and B of each set; all else is shared.
      ops: how many ops run over them in one call.
    """

    x: Float[Array, "tokens d_in"]
    y: Float[Array, "tokens d_out"]
    banks: Sequence[tuple[Array, Array]]
    scale: Float[Array, "slots parts"]
    rank: Int32[Array, "slots parts"]
    routing: Routing
    ops: int

    @property
    def slot(self) -> np.ndarray:
        """Slot of each row, on the host, `(tokens,)`."""
        return np.asarray(self.routing.slot)


def sizes() -> Sizes:
    """Returns the sizes for the platform that JAX runs on."""
    return CPU_SIZES if jax.default_backend() == "cpu" else ACCELERATOR_SIZES


def pool_of(spec: Spec, *, seed: int = 0) -> Pool:
    """Returns the argument sets of a workload; the same numbers for the same seed."""
    rng = np.random.default_rng(seed)
    slot, rank = slots_of_rows(spec, rng), ranks_of(spec)
    count, ops = _counts(spec, slot, sizes())
    scale = (0.5 + rng.random(rank.shape)) / np.sqrt(np.maximum(rank, 1))
    # The name and who has which row do not matter to the drawing, nor to its compiling.
    shape = Spec(
        name="", tokens=spec.tokens, slots=spec.slots, d_in=spec.d_in,
        part_widths=spec.part_widths, ranks=spec.ranks, max_rank=spec.max_rank,
        dtype=spec.dtype,
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(seed), count + 1)
    x, y = _draw_rows(shape, keys[0])
    return Pool(
        x=x,
        y=y,
        banks=[_draw_bank(shape, key) for key in keys[1:]],
        scale=jnp.asarray(scale, jnp.float32),
        rank=jnp.asarray(rank),
        routing=_routing(jnp.asarray(slot), spec.slots),
        ops=ops,
    )


def _counts(spec: Spec, slot: np.ndarray, limit: Sizes) -> tuple[int, int]:
    """Returns how many argument sets to draw, and how many ops run over them."""
    d_out, parts = sum(spec.part_widths), len(spec.part_widths)
    numbers = spec.slots * spec.rank_axis * (parts * spec.d_in + d_out)
    read = max(cost.weight_bytes(spec, slot), 1.0)
    room = int(limit.bank_bytes // (numbers * jnp.dtype(spec.dtype).itemsize))
    count = max(2, min(int(-(-limit.read_bytes // read)), limit.sets, room))
    return count, max(count, limit.ops)


@functools.partial(jax.jit, static_argnums=0)
def _draw_rows(spec: Spec, key: Array) -> tuple[Array, Array]:
    key_x, key_y = jax.random.split(key)
    x = jax.random.normal(key_x, (spec.tokens, spec.d_in), spec.dtype)
    return x, jax.random.normal(key_y, (spec.tokens, sum(spec.part_widths)), spec.dtype)


@functools.partial(jax.jit, static_argnums=0)
def _draw_bank(spec: Spec, key: Array) -> tuple[Array, Array]:
    """Returns A and B, so scaled that an update has y's size, 0 in the rank tails."""
    key_a, key_b = jax.random.split(key)
    slots, parts, d_out = spec.slots, len(spec.part_widths), sum(spec.part_widths)
    most = max(spec.ranks)
    kept = jnp.arange(most)[None, None, :] < jnp.asarray(ranks_of(spec))[:, :, None]
    a = jax.random.normal(key_a, (slots, parts, most, spec.d_in), spec.dtype)
    a = jnp.where(kept[..., None], a * spec.d_in**-0.5, 0)
    b = jax.random.normal(key_b, (slots, most, d_out), spec.dtype)
    part = np.repeat(np.arange(parts), spec.part_widths)
    b = jnp.where(kept.swapaxes(1, 2)[:, :, part], b, 0)
    tail, none = (0, spec.rank_axis - most), (0, 0)
    return jnp.pad(a, (none, none, tail, none)), jnp.pad(b, (none, tail, none))


_routing = jax.jit(make_routing, static_argnums=1)
