"""make_routing: slot of each token -> order, starts and work list."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_cases import with_fields
from lora_kernels import Routing, make_routing
from lora_kernels import routing as routings
from lora_kernels.routing import (
    LEAVES,
    active_groups,
    max_work_items,
    routing_faults,
    work_list,
)

# Recorded from vLLM 0.32, four slots: tokens -> ids, counts, starts, order.
VLLM_TABLES = [
    (
        [0, 0, -1, 2, 2, -1, 0],
        [-1, 0, 2, -1, -1],
        [2, 3, 2, 0, 0],
        [0, 2, 5, 7, 0, 0],
        [2, 5, 0, 1, 6, 3, 4],
    ),
    ([0, 1], [0, 1, -1, -1, -1], [1, 1, 0, 0, 0], [0, 1, 2, 0, 0, 0], [0, 1]),
    ([0, 1, -1], [-1, 0, 1, -1, -1], [1, 1, 1, 0, 0], [0, 1, 2, 3, 0, 0], [2, 0, 1]),
    (
        [0, 1, 2, 3, -1],
        [-1, 0, 1, 2, 3],
        [1, 1, 1, 1, 1],
        [0, 1, 2, 3, 4, 5],
        [4, 0, 1, 2, 3],
    ),
]


@pytest.mark.parametrize(("slot", "ids", "counts", "starts", "order"), VLLM_TABLES)
def test_active_groups_equal_vllm_kernel_metadata(slot, ids, counts, starts, order):
    routing = make_routing(jnp.array(slot), 4)
    assert routing.slot.tolist() == slot
    assert routing.order.tolist() == order
    assert [part.tolist() for part in active_groups(routing)] == [ids, counts, starts]


def test_a_batch_of_base_rows_has_no_work():
    routing = make_routing(jnp.full((5,), -1), 4)
    assert routing.work_count == 0
    assert (routing.work_slot == -1).all()
    assert routing.counts.tolist() == [0, 0, 0, 0]


# Few shapes and many values: each shape is compiled once.
SHAPES = [(0, 3, 2), (1, 1, 1), (7, 9, 3), (40, 4, 16), (40, 9, 2)]
jitted_routing = jax.jit(make_routing, static_argnums=1, static_argnames="block")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(shape=st.sampled_from(SHAPES), data=st.data())
def test_every_adapted_row_is_in_exactly_one_work_item(shape, data):
    tokens, num_slots, block = shape
    slots = st.integers(-3, num_slots + 2)
    slot = data.draw(st.lists(slots, min_size=tokens, max_size=tokens))
    routing = jitted_routing(jnp.array(slot, jnp.int32), num_slots, block=block)
    inside = np.array([s if 0 <= s < num_slots else -1 for s in slot], np.int32)
    order, starts = np.array(routing.order), np.array(routing.starts)
    assert routing.slot.tolist() == inside.tolist()
    assert order.tolist() == np.argsort(inside, kind="stable").tolist()
    for group in range(num_slots + 1):
        rows = order[starts[group] : starts[group + 1]]
        assert rows.tolist() == np.flatnonzero(inside == group - 1).tolist()
    seen = []
    used = int(routing.work_count)
    for s, start, stop in zip(*_work(routing), strict=True):
        rows = order[start:stop]
        assert len(rows) <= block
        assert (len(rows) > 0) == (s >= 0)
        assert (inside[rows] == s).all()
        seen.extend(rows)
    assert sorted(seen) == np.flatnonzero(inside >= 0).tolist()
    assert (np.array(routing.work_slot) >= 0).sum() == used
    assert used <= max_work_items(len(slot), num_slots, block) == len(_work(routing)[0])


def _work(routing):
    return [
        np.array(field)
        for field in (routing.work_slot, routing.work_start, routing.work_stop)
    ]


@pytest.mark.parametrize("block", [1, 4, 16])
def test_the_work_bound_is_reached(block):
    # One row in each slot but the first, which takes all others: the most waste.
    slot = jnp.array([0] * (3 * block + 1) + [1, 2, 3])
    routing = make_routing(slot, 4, block=block)
    assert routing.work_count == max_work_items(3 * block + 4, 4, block)


def test_a_backend_can_list_the_work_for_its_own_tile():
    slot = jnp.array([0] * 7 + [-1, 2])
    routing = make_routing(slot, 3, block=16)
    narrow = make_routing(slot, 3, block=4)
    items = max_work_items(9, 3, 4)
    for mine, wanted in zip(
        work_list(routing.starts, items, 4)[:3], _work(narrow), strict=True
    ):
        assert mine.tolist() == wanted.tolist()


@pytest.mark.parametrize("comparisons", [0, 1 << 30], ids=["counted", "compared"])
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize(("tokens", "slots"), [(0, 5), (300, 2), (300, 2000)])
def test_many_groups_equal_a_sort_by_hand(
    monkeypatch, tokens, slots, block, comparisons
):
    monkeypatch.setattr(routings, "MOST_COMPARISONS", comparisons)
    slot = np.random.default_rng(0).integers(-1, slots, tokens).astype(np.int32)
    found = make_routing(jnp.asarray(slot), slots, block=block)
    inside = np.sort(slot)
    starts = np.searchsorted(inside, np.arange(-1, slots + 1))
    assert found.starts.tolist() == starts.tolist()
    items = [
        (owner, first, min(first + block, starts[owner + 2]))
        for owner in range(slots)
        for first in range(starts[owner + 1], starts[owner + 2], block)
    ]
    used = int(found.work_count)
    assert list(zip(*(w[:used].tolist() for w in _work(found)), strict=True)) == items
    assert (np.stack(_work(found))[:, used:].T == [-1, 0, 0]).all()


def test_the_work_of_a_routing_does_not_grow_with_rows_times_groups():
    rows, groups = 16384, 8192
    slot = jax.ShapeDtypeStruct((rows,), jnp.int32)
    compiled = jax.jit(make_routing, static_argnums=1).lower(slot, groups).compile()
    assert compiled.cost_analysis()["flops"] < rows * groups / 10
    assert compiled.memory_analysis().temp_size_in_bytes < 100 * (rows + groups)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "uint32"])
def test_slots_of_every_integer_dtype_are_normalised(dtype):
    slot = np.array([0, 3, 100, 127], dtype)
    routing = make_routing(jnp.asarray(slot), 100)
    assert routing.slot.tolist() == [0, 3, -1, -1]
    assert routing.slot.dtype == jnp.int32


def test_int64_slots_do_not_wrap_into_the_bank():
    with jax.enable_x64(True):
        slot = jnp.array([2**32, -(2**32), 1], jnp.int64)
        assert make_routing(slot, 4).slot.tolist() == [-1, -1, 1]


def test_routing_is_int32_and_float32_under_jit_and_does_not_retrace():
    traces = []

    @jax.jit
    def step(slot):
        traces.append(1)
        return make_routing(slot, 8)

    for seed in range(4):
        routing = step(jnp.array(np.random.default_rng(seed).integers(-1, 9, 20)))
    assert len(traces) == 1
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(routing)}
    assert dtypes == {"int32", "float32"}
    assert routing.num_slots == 8


def test_routing_is_a_tree_of_anything():
    routing = make_routing(jnp.array([0, 1]), 2)
    shapes = jax.eval_shape(lambda: routing)
    assert isinstance(shapes, Routing)
    assert jax.tree.map(lambda _: None, routing).block == routing.block
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(routing)]
    assert paths[:2] == [".slot", ".weight"]


def test_weights_are_kept_as_float32():
    routing = make_routing(jnp.array([0, 1]), 2, weight=jnp.array([0.5, 2.0]))
    assert routing.weight.tolist() == [0.5, 2.0]
    assert make_routing(jnp.array([0]), 2).weight.tolist() == [1.0]


def test_an_empty_batch_has_empty_routing():
    routing = make_routing(jnp.zeros((0,), jnp.int32), 3)
    assert routing.order.shape == (0,)
    assert routing.starts.tolist() == [0] * 5
    assert routing.work_count == 0


@pytest.mark.parametrize(("num_slots", "block"), [(0, 16), (4, 0)])
def test_sizes_must_be_positive(num_slots, block):
    with pytest.raises(ValueError, match="must be positive"):
        make_routing(jnp.array([0]), num_slots, block=block)


# Of five tokens: what is changed -> what the error says.
FAULTS = {
    "short": ({"weight": jnp.ones(3)}, r"weight is float32 \(3,\), expected .*\(5,\)"),
    "one": ({"weight": jnp.ones(1)}, r"weight is float32 \(1,\), expected .*\(5,\)"),
    "integers": ({"weight": jnp.ones(5, int)}, r"weight is int32 \(5,\), expected fl"),
    "slots": ({"slot": jnp.zeros(5)}, r"slot is float32 \(5,\), expected integers"),
    "axes": ({"slot": jnp.zeros((5, 1), int)}, r"slot is int32 \(5, 1\), expected int"),
    "all": (
        {"weight": jnp.ones(3), "num_slots": 0, "slot": jnp.zeros(5)},
        "num_slots=0.*slot is.*weight is",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_arguments_that_do_not_fit_are_named(fault):
    # Past the run-time type check of tests, which names them too.
    call = inspect.unwrap(make_routing)
    change, text = FAULTS[fault]
    arguments = {"slot": jnp.zeros(5, jnp.int32), "num_slots": 2} | change
    with pytest.raises(ValueError, match=f"make_routing: .*{text}"):
        call(**arguments)


def test_a_routing_of_make_routing_has_no_faults():
    for tokens, block in [(0, 16), (1, 1), (40, 4)]:
        routing = make_routing(jnp.zeros(tokens, jnp.int32), 3, block=block)
        assert list(routing_faults(routing)) == []
        assert list(routing_faults(jax.eval_shape(lambda r=routing: r))) == []


@pytest.mark.parametrize("name", LEAVES)
def test_every_field_of_a_routing_made_by_hand_is_checked(name):
    routing = make_routing(jnp.zeros(40, jnp.int32), 3)
    field = getattr(routing, name)
    (found,) = routing_faults(with_fields(routing, **{name: field.astype(bool)}))
    assert found.startswith(f"{name} is bool {field.shape}, expected ")
    (found,) = routing_faults(with_fields(routing, **{name: field[None]}))
    assert f"{field.dtype} {(1, *field.shape)}" in found
    if name not in ("slot", "starts", "work_count"):
        (found,) = routing_faults(with_fields(routing, **{name: field[:1]}))
        assert found.startswith(f"{name} is {field.dtype} (1,), expected ")


def test_all_faults_of_a_routing_are_told_at_once():
    routing = make_routing(jnp.zeros(40, jnp.int32), 3)
    routing = with_fields(routing, weight=routing.weight[:1], order=routing.order[:7])
    found = list(routing_faults(routing))
    assert found == [
        "weight is float32 (1,), expected floats (40,)",
        "order is int32 (7,), expected int32 (40,)",
    ]
