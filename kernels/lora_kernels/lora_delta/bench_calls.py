"""A workload and its argument sets -> calls that run many ops each.

A call runs the ops over the sets in one jit: y goes from op to op and from call to
call, donated, so that nobody copies it.
"""

import functools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lora_kernels import lora_delta, make_routing
from lora_kernels.lora_delta import xla, xla_cpu_forms, xla_forms
from lora_kernels.lora_delta.bench_pool import Pool, sizes
from lora_kernels.lora_delta.site import Site
from lora_kernels.lora_delta.specs import Spec
from lora_kernels.routing import Routing

BASE = "base_projection"
"""Name under which `x @ W` of the same site is timed."""

ROUTING = "routing"
"""Name under which `make_routing`, once a step of the model, is timed."""

EMPTY = "empty_call"
"""Name of the same call without an op: what starting and waiting adds to each op."""

BESIDE = (BASE, ROUTING, EMPTY)
"""What is timed beside the implementations."""

MOST_PRODUCTS_BYTES = 2**32
"""Of the base projections of one call, all of which are kept."""

ROUTINGS = 8
"""Routings in one call."""

XLA_FORMS = MappingProxyType(
    {
        "xla:loop": xla_cpu_forms.loop,
        "xla:flat": xla_cpu_forms.flat,
        "xla:few": xla_cpu_forms.few,
        "xla:gather": xla_forms.gather,
        "xla:batched": xla_forms.batched,
    }
)
"""Name -> one form of `xla`, whatever `xla` itself would choose."""

BLOCKS = MappingProxyType(
    {"xla:loop": xla.loop_block, "xla:batched": xla.batched_block}
)
"""Name of a form that works in blocks of rows -> the block that `xla` gives it."""


class Call(NamedTuple):
    """A function that runs `ops` ops and waits for them."""

    run: Callable[[], None]
    ops: int


Op = Callable[..., Array]
"""(x, y, a, b, scale, rank, routing) -> the new y."""


def prepare(name: str, spec: Spec, pool: Pool) -> Call:
    """Returns the call that is timed under a name.

    Args:
      name: of `BESIDE`, of an implementation of `lora_delta`, or of `XLA_FORMS`.
    Raises:
      NotImplementedError: if the implementation refuses the workload.
    """
    if name == BASE:
        return _base_call(spec, pool)
    if name == ROUTING:
        return _routing_call(pool)
    chain = jax.jit(
        functools.partial(chain_of_ops, op=op_of(name, spec), ops=pool.ops),
        donate_argnums=0,
        keep_unused=True,
    )
    rest = (pool.x, pool.banks, pool.scale, pool.rank, pool.routing, jnp.int32(1))
    return Call(_repeated(chain, pool.y, rest), pool.ops)


def op_of(name: str, spec: Spec) -> Op:
    """Returns what a name computes, with the part widths of a workload."""
    if name == EMPTY:
        return lambda x, y, *rest: y
    if name not in XLA_FORMS:
        return lambda x, y, a, b, scale, rank, routing: lora_delta(
            x, y, a, b, scale=scale, rank=rank, routing=routing,
            part_widths=spec.part_widths, implementation=name,
        )  # fmt: skip
    form: Op = XLA_FORMS[name]
    if name in BLOCKS:
        form = functools.partial(form, block=BLOCKS[name](spec.tokens, spec.slots))
    return lambda x, y, a, b, scale, rank, routing: form(
        x, y, Site(a, b, scale, rank, spec.part_widths), routing
    )


def chain_of_ops(
    y: Array,
    x: Array,
    banks: Sequence[tuple[Array, Array]],
    scale: Array,
    rank: Array,
    routing: Routing,
    once: Array,
    *,
    op: Op,
    ops: int,
) -> Array:
    for i in range(ops):
        rest = (*banks[i % len(banks)], scale, rank, routing)
        y = apart(lambda x, y, rest=rest: op(x, y, *rest), x, y, once)
    return y


def apart(
    op: Callable[[Array, Array], Array], x: Array, y: Array, once: Array
) -> Array:
    """Returns `op(x, y)`, which XLA neither merges with others nor begins before y.

    Args:
      once: 1, which XLA does not know: on a CPU, where barriers do not keep the sums of
        successive ops out of one fused loop, the op is the body of a loop.
    """
    if jax.default_backend() == "cpu":
        return jax.lax.fori_loop(0, once, lambda _, y: op(x, y), y)
    return op(*jax.lax.optimization_barrier((x, y)))


def _base_call(spec: Spec, pool: Pool) -> Call:
    """Multiplies x by kernels in turn."""
    shape = (spec.d_in, sum(spec.part_widths))
    kernel_bytes = pool.x.dtype.itemsize * shape[0] * shape[1]
    count = max(2, min(-(-sizes().read_bytes // kernel_bytes), sizes().sets))
    keys = jax.random.split(jax.random.key(0), count)
    kernels = [_draw_kernel(shape, spec.dtype, key) for key in keys]
    ops = max(count, min(sizes().ops, MOST_PRODUCTS_BYTES // pool.y.nbytes))
    chain = jax.jit(functools.partial(base_chain, ops=ops))

    def run() -> None:
        jax.block_until_ready(chain(pool.x, pool.y, kernels, jnp.int32(1)))

    return Call(run, ops)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draw_kernel(shape: tuple[int, int], dtype: str, key: Array) -> Array:
    return jax.random.normal(key, shape, dtype) * shape[0] ** -0.5


def base_chain(
    x: Array, y: Array, kernels: Sequence[Array], once: Array, *, ops: int
) -> list[Array]:
    """Returns the products of x with kernels in turn, all of them, lest XLA drop one.

    Args:
      y: anything of a product's shape.
      once: as in `apart`.
    """
    products = [y]
    for i in range(ops):
        kernel = kernels[i % len(kernels)]
        if jax.default_backend() == "cpu":
            product = apart(lambda x, _, k=kernel: x @ k, x, products[-1], once)
        else:
            x, products[-1] = jax.lax.optimization_barrier((x, products[-1]))
            product = x @ kernel
        products.append(product)
    return products[1:]


def _routing_call(pool: Pool) -> Call:
    """Makes routings one after another, all of them whole."""
    slot, weight = pool.routing.slot, pool.routing.weight
    slots = pool.routing.num_slots

    def run() -> None:
        jax.block_until_ready(_routings(slot, weight, slots))

    return Call(run, ROUTINGS)


@functools.partial(jax.jit, static_argnums=2)
def _routings(slot: Array, weight: Array, slots: int) -> list[Routing]:
    made = []
    for _ in range(ROUTINGS):
        made.append(make_routing(slot, slots, weight=weight))
        # A zero that XLA does not know before the routing is there.
        slot = slot + jnp.minimum(made[-1].work_count, 0)
    return made


def _repeated(
    chain: Callable[..., Array], y: Array, rest: tuple[object, ...]
) -> Callable[[], None]:
    """Returns a call of the chain on the y that its last call left."""
    y = jnp.copy(y)

    def run() -> None:
        nonlocal y
        y = jax.block_until_ready(chain(y, *rest))

    return run
