"""pair_routing: slots of tokens and experts of pairs -> routing over virtual slots."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from delta_cases import with_fields
from expert_cases import CASES, expert_arrays
from lora_kernels import make_routing, pair_routing


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_pair_has_the_virtual_slot_of_its_adapter_and_expert(case):
    arrays = expert_arrays(case)
    tokens = make_routing(
        jnp.asarray(arrays.slot), case.slots, weight=jnp.asarray(arrays.weight)
    )
    pairs = pair_routing(tokens, jnp.asarray(arrays.expert), case.experts)
    flat = arrays.virtual
    assert pairs.num_slots == case.slots * case.experts
    assert pairs.slot.tolist() == flat.slot.tolist()
    assert pairs.weight.tolist() == flat.weight.tolist()
    rows = np.bincount(flat.slot[flat.slot >= 0], minlength=pairs.num_slots)
    assert pairs.counts.tolist() == rows.tolist()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32"])
def test_experts_of_every_integer_dtype_are_understood(dtype):
    tokens = make_routing(jnp.array([2, 0]), 3)
    expert = jnp.asarray(np.array([99, 100, 127, 0], dtype))
    pairs = pair_routing(tokens, expert, 100)
    assert pairs.slot.tolist() == [299, -1, -1, 0]
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(pairs)}
    assert dtypes == {"int32", "float32"}


def test_int64_experts_do_not_wrap_into_another_adapter():
    with jax.enable_x64(True):
        tokens = make_routing(jnp.array([1]), 3)
        expert = jnp.array([2**32 + 1, -(2**32), 1], jnp.int64)
        pairs = pair_routing(tokens, expert, 4)
        assert pairs.slot.tolist() == [-1, -1, 5]
        assert pairs.slot.dtype == jnp.int32


def test_a_remote_expert_never_becomes_one_of_another_adapter():
    tokens = make_routing(jnp.array([1, 1, 0, -1]), 2)
    pairs = pair_routing(tokens, jnp.array([-1, 4, 4, 0]), 4)
    assert pairs.slot.tolist() == [-1, -1, -1, -1]
    assert pairs.work_count == 0


@pytest.mark.parametrize(("tokens", "block"), [(16, 1), (17, 16)])
def test_few_pairs_among_many_slots_are_work_items_of_their_own(tokens, block):
    routing = make_routing(jnp.zeros((tokens,), jnp.int32), 8)
    pairs = pair_routing(routing, jnp.arange(tokens * 2, dtype=jnp.int32) % 16, 16)
    assert pairs.block == block
    stop, start = np.array(pairs.work_stop), np.array(pairs.work_start)
    assert (stop - start).max() == min(block, 3 if tokens > 16 else 2)


def test_nothing_retraces_when_mixes_or_choices_change():
    traces = []

    @jax.jit
    def step(slot, expert):
        traces.append(1)
        return pair_routing(make_routing(slot, 3), expert, 4).slot

    rng = np.random.default_rng(0)
    for _ in range(3):
        step(jnp.array(rng.integers(-1, 3, 5)), jnp.array(rng.integers(-1, 5, 10)))
    assert len(traces) == 1


# tokens, pairs, experts -> what is wrong
FAULTS = [
    (3, 4, 2, "4 pairs, 3 tokens"),
    (0, 4, 2, "4 pairs, 0 tokens"),
    (2, 4, 0, "num_experts=0"),
]


@pytest.mark.parametrize(("tokens", "pairs", "experts", "text"), FAULTS)
def test_sizes_that_do_not_fit_are_named(tokens, pairs, experts, text):
    routing = make_routing(jnp.zeros((tokens,), jnp.int32), 2)
    with pytest.raises(ValueError, match=text):
        pair_routing(routing, jnp.zeros((pairs,), jnp.int32), experts)


def test_a_routing_of_tokens_made_by_hand_is_checked():
    routing = make_routing(jnp.zeros((3,), jnp.int32), 2)
    routing = with_fields(routing, weight=jnp.ones(1), order=jnp.zeros(3))
    expert = jnp.zeros((4,))
    text = r"pair_routing: routing.weight is .*; routing.order is .*4 pairs, 3 tokens; "
    with pytest.raises(ValueError, match=text + r"expert is float32 \(4,\)"):
        # Past the run-time type check of tests.
        inspect.unwrap(pair_routing)(routing, expert, 2)
