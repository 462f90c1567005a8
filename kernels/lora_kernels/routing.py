"""Slot of each token -> what every kernel of the step needs to know about the batch.

Computed once per step, inside jit, and handed to all sites: which rows belong to which
slot (a stable order and group starts) and a compact list of row tiles. Shapes depend
on the number of tokens, of slots and on `block` alone, so nothing recompiles when the
mix of adapters changes. Knows nothing of weights, ranks or models.

Source: vLLM's LoRAKernelMeta (same order, counts and starts); the compact list is
SGLang's csgmv chunk list, https://github.com/sgl-project/sglang.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Integer

BASE_SLOT = -1
"""Slot of a row that no adapter touches. It is no index: such rows are masked out."""

WORK_BLOCK = 16
"""Most rows in one work item; 16 is the smallest row tile of a tensor-core product."""

MOST_COMPARISONS = 1 << 20
"""Up to so many comparisons of rows with groups are made, in one fused kernel on a GPU
and half a millisecond on a CPU; beyond, rows are counted by a scatter."""


@dataclass(frozen=True)
class Routing:
    """The per-batch facts, one pytree. Build it with `make_routing`.

    Attributes:
      slot: bank slot of each token, in `[0, slots)`, or -1 for a base row.
      weight: strength of the adapter on each token; multiplies the low-rank product.
      order: token numbers sorted by slot, ties in token order; base rows first.
      position: place of each token in `order`, its inverse.
      starts: group `g` is `order[starts[g]:starts[g + 1]]`; group 0 holds the base
        rows, group `s + 1` the rows of slot `s`.
      work_slot: slot of each work item, -1 for the unused items at the end.
      work_start: first position of the item's rows in `order`.
      work_stop: one past its last; `work_stop - work_start <= block`, 0 when unused.
      work_count: number of items in use. Base rows make no items.
      block: most rows in one work item (static).

        order      [ base rows | rows of slot 0    | rows of slot 2 | ... ]
        starts     0           2                   5 5              9
        work items               [-- block --][ ]    [-- block --]
    """

    slot: Int32[Array, " tokens"]
    weight: Float[Array, " tokens"]
    order: Int32[Array, " tokens"]
    position: Int32[Array, " tokens"]
    starts: Int32[Array, " groups_plus_1"]
    work_slot: Int32[Array, " items"]
    work_start: Int32[Array, " items"]
    work_stop: Int32[Array, " items"]
    work_count: Int32[Array, ""]
    block: int

    @property
    def num_slots(self) -> int:
        """Number of slots of the bank (static)."""
        return self.starts.size - 2

    @property
    def counts(self) -> Int[Array, " slots"]:
        """Rows of each slot in this batch."""
        return self.starts[2:] - self.starts[1:-1]


LEAVES = tuple(f.name for f in dataclasses.fields(Routing) if f.name != "block")


def _flatten(
    routing: Routing,
) -> tuple[list[tuple[object, object]], int]:
    keyed: list[tuple[object, object]] = [
        (jax.tree_util.GetAttrKey(name), getattr(routing, name)) for name in LEAVES
    ]
    return keyed, routing.block


def _unflatten(block: int, leaves: Iterable[object]) -> Routing:
    # Not through __init__: JAX also rebuilds trees of shapes, shardings and None, which
    # a run-time type check of the fields would refuse.
    routing = object.__new__(Routing)
    for name, leaf in zip(LEAVES, leaves, strict=True):
        object.__setattr__(routing, name, leaf)
    object.__setattr__(routing, "block", block)
    return routing


jax.tree_util.register_pytree_with_keys(Routing, _flatten, _unflatten)


def max_work_items(tokens: int, slots: int, block: int) -> int:
    """Returns the most work items that `tokens` rows over `slots` slots can make.

    Each of the `g <= min(slots, tokens)` groups that have rows wastes at most
    `block - 1` rows, so the sum of `ceil(count / block)` is at most
    `(tokens + g * (block - 1)) / block`.
    """
    return (tokens + min(slots, tokens) * (block - 1)) // block


def make_routing(
    slot: Integer[Array, " tokens"],
    num_slots: int,
    *,
    weight: Float[Array, " tokens"] | None = None,
    block: int = WORK_BLOCK,
) -> Routing:
    """Returns the routing of one batch; pure, jit-able, without host synchronisation.

    Args:
      slot: bank slot of each token; any value outside `[0, num_slots)` means base.
      num_slots: slots of the bank, at least 1 (static).
      weight: strength of the adapter on each token; None means 1.
      block: most rows in one work item, at least 1 (static).
    Raises:
      ValueError: if `num_slots` or `block` is not positive, `slot` no list of integers,
        or `weight` not one float for each token.

    Example:
      >>> import jax.numpy as jnp
      >>> routing = make_routing(jnp.array([0, 0, -1, 2, 2, -1, 0]), 4)
      >>> routing.order.tolist(), routing.starts.tolist()
      ([2, 5, 0, 1, 6, 3, 4], [0, 2, 5, 5, 7, 7])
    """
    found = []
    if num_slots < 1 or block < 1:
        found.append(f"num_slots={num_slots} and block={block} must be positive")
    if slot.ndim != 1 or not jnp.issubdtype(slot.dtype, jnp.integer):
        found.append(f"slot is {_described(slot)}, expected integers (tokens,)")
    if weight is None:
        weight = jnp.ones(slot.shape, jnp.float32)
    if weight.shape != slot.shape or not jnp.issubdtype(weight.dtype, jnp.floating):
        found.append(f"weight is {_described(weight)}, expected floats {slot.shape}")
    if found:
        raise ValueError(f"make_routing: {'; '.join(found)}.")
    tokens = slot.shape[0]
    slot = in_range_or_base(slot, num_slots)
    order = jnp.argsort(slot, stable=True).astype(jnp.int32)
    position = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(tokens, dtype=jnp.int32), unique_indices=True)
    )
    starts = _group_starts(slot, num_slots)
    items = max_work_items(tokens, num_slots, block)
    work_slot, work_start, work_stop, work_count = work_list(starts, items, block)
    return Routing(
        slot=slot,
        weight=weight.astype(jnp.float32),
        order=order,
        position=position,
        starts=starts,
        work_slot=work_slot,
        work_start=work_start,
        work_stop=work_stop,
        work_count=work_count,
        block=block,
    )


def in_range_or_base(
    slot: Integer[Array, " tokens"], num_slots: int
) -> Int32[Array, " tokens"]:
    """Returns the slots in int32, those outside `[0, num_slots)` as -1."""
    # Narrow integers are widened before the comparison, wide ones compared before the
    # cast: neither 200 slots in int8 nor slot 2**32 in int64 may wrap around.
    wide = slot if slot.dtype.itemsize >= 4 else slot.astype(jnp.int32)
    inside: Bool[Array, " tokens"] = (wide >= 0) & (wide < num_slots)
    return jnp.where(inside, wide.astype(jnp.int32), jnp.int32(BASE_SLOT))


def _group_starts(
    slot: Int32[Array, " tokens"], num_slots: int
) -> Int32[Array, " groups_plus_1"]:
    return _counts_below(slot, BASE_SLOT, num_slots + 2)


def _counts_below(
    values: Int32[Array, " values"], first: int, length: int
) -> Int32[Array, " {length}"]:
    """Returns how many values are below `first`, below `first + 1`, and so on."""
    if values.shape[0] * length <= MOST_COMPARISONS:
        # One comparison and sum, which XLA fuses; searchsorted would be a loop of
        # kernels on a GPU.
        bound = first + jnp.arange(length, dtype=jnp.int32)
        return jnp.sum(values[None, :] < bound[:, None], axis=1, dtype=jnp.int32)
    # A value counts from the bound above it on. Integer sums have one result in any
    # order, so the scatter may add atomically.
    place = jnp.maximum(values - (first - 1), 0)
    counts = jnp.zeros((length,), jnp.int32).at[place].add(1, mode="drop")
    return jnp.cumsum(counts, dtype=jnp.int32)


def work_list(
    starts: Int32[Array, " groups_plus_1"], items: int, block: int
) -> tuple[
    Int32[Array, " {items}"],
    Int32[Array, " {items}"],
    Int32[Array, " {items}"],
    Int32[Array, ""],
]:
    """Returns `(slot, start, stop)` of each row tile, and how many are in use.

    A backend whose row tile differs from the routing's `block` may call it again with
    its own; inside one jit XLA computes equal calls once.

    Args:
      starts: group starts as in `Routing`.
      items: length of the list, at least `max_work_items(...)` (static).
      block: most rows in one item (static).
    """
    first_row, stop_row = starts[1:-1], starts[2:]
    tiles = (stop_row - first_row + (block - 1)) // block
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    item = jnp.arange(items, dtype=jnp.int32)
    owner = _counts_below(ends, 1, items)
    used = item < ends[-1]
    owner = jnp.where(used, owner, 0)
    tile_in_group = item - (ends - tiles)[owner]
    start = jnp.where(used, first_row[owner] + tile_in_group * block, 0)
    stop = jnp.where(used, jnp.minimum(start + block, stop_row[owner]), 0)
    return jnp.where(used, owner, jnp.int32(BASE_SLOT)), start, stop, ends[-1]


def routing_faults(routing: Routing) -> Iterator[str]:
    """Yields what is wrong with the shapes and dtypes of a routing's fields.

    One that `make_routing` returns has no faults; this is for one that was made or
    changed by hand.
    """
    if routing.slot.ndim != 1 or routing.starts.ndim != 1 or routing.block < 1:
        yield (
            f"slot is {_described(routing.slot)}, starts {_described(routing.starts)} "
            f"and block {routing.block}, expected int32 (tokens,), int32 (slots + 2,) "
            "and at least 1"
        )
        return
    tokens = routing.slot.shape
    items = (max_work_items(tokens[0], routing.num_slots, routing.block),)
    shapes = {
        "slot": tokens,
        "weight": tokens,
        "order": tokens,
        "position": tokens,
        "starts": routing.starts.shape,
        "work_slot": items,
        "work_start": items,
        "work_stop": items,
        "work_count": (),
    }
    for name, shape in shapes.items():
        field = getattr(routing, name)
        floats = name == "weight"
        kind = jnp.floating if floats else jnp.int32
        if field.shape != shape or not jnp.issubdtype(field.dtype, kind):
            wanted = f"{'floats' if floats else 'int32'} {shape}"
            yield f"{name} is {_described(field)}, expected {wanted}"


def _described(array: Array) -> str:
    return f"{array.dtype} {array.shape}"


def active_groups(
    routing: Routing,
) -> tuple[
    Int32[Array, " groups"], Int32[Array, " groups"], Int32[Array, " groups_plus_1"]
]:
    """Returns the groups that have rows, in vLLM's layout: ids, counts and starts.

    Args:
      routing: the routing of one batch over `slots` slots.
    Returns:
      ids: slots with rows, ascending, -1 first if there are base rows; -1 at the end
        of the list, `(slots + 1,)`. counts: their rows, 0 at the end. starts: their
        first positions in `order`, then the number of tokens, 0 at the end,
        `(slots + 2,)`.
    Source: vLLM 0.32, `lora/ops/triton_ops/lora_kernel_metadata.py`.
    """
    counts = routing.starts[1:] - routing.starts[:-1]
    groups = counts.shape[0]
    present_first = jnp.argsort(counts == 0, stable=True).astype(jnp.int32)
    present = counts[present_first] > 0
    ids = jnp.where(present, present_first - 1, jnp.int32(BASE_SLOT))
    counts = counts[present_first]
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    starts = jnp.zeros((groups + 1,), jnp.int32).at[1:].set(jnp.where(present, ends, 0))
    return ids, counts, starts
