"""Named workloads: distributions, and arrays that are what the spec says."""

import collections

import numpy as np
import pytest

from delta_cases import small
from lora_kernels.lora_delta.specs import (
    DISTRIBUTIONS,
    SITES,
    Spec,
    arrays_of,
    expert_specs,
    site_specs,
)
from lora_kernels.lora_delta.suites import suites

# distribution -> rows of each slot, most first, for 64 tokens over 16 slots.
COUNTS = {
    "identical": [64],
    "distinct": [4] * 16,
    "uniform": [8] * 8,
    "half_base": [32] + [4] * 8,
    "all_base": [64],
}


@pytest.mark.parametrize("distribution", COUNTS)
def test_rows_fall_to_slots_as_named(distribution):
    slot = arrays_of(small(tokens=64, slots=16, distribution=distribution)).slot
    counts = [n for _, n in collections.Counter(slot.tolist()).most_common()]
    assert counts == COUNTS[distribution]
    base = {"half_base": 32, "all_base": 64}.get(distribution, 0)
    assert (slot < 0).sum() == base


@pytest.mark.parametrize("distribution", ["skewed", "zipf"])
def test_popular_slots_come_first(distribution):
    slot = arrays_of(small(tokens=4096, slots=8, distribution=distribution)).slot
    counts = np.bincount(slot, minlength=8)
    assert (np.diff(counts) < 0).sum() >= 6
    assert counts[0] > 1200


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_sorted_specs_are_sorted_but_for_base_rows(distribution):
    slot = arrays_of(small(shuffled=False, distribution=distribution)).slot
    assert (np.diff(slot[slot >= 0]) >= 0).all()


def test_unknown_distributions_are_refused():
    with pytest.raises(ValueError, match=r"unknown distribution 'flat'.*zipf"):
        arrays_of(small(distribution="flat"))


def test_arrays_have_the_sizes_ranks_and_zeros_of_the_spec():
    spec = small(max_rank=16, dtype="bfloat16")
    arrays = arrays_of(spec)
    assert [field.shape for field in arrays] == [
        (23, 24), (23, 21), (5, 3, 16, 24), (5, 16, 21), (5, 3), (5, 3), (23,), (23,)
    ]  # fmt: skip
    assert {str(field.dtype) for field in arrays[:4]} == {"bfloat16"}
    assert arrays.rank[0].tolist() == [3, 0, 8]
    assert not arrays.a[0, 1].any()
    assert arrays.a[0, 2, :8].any(axis=1).all()
    assert not arrays.b[0, 3:, :10].any()
    np.testing.assert_array_equal(arrays.x, arrays_of(spec).x)


@pytest.mark.parametrize("model", SITES)
def test_every_model_has_its_four_fused_sites(model):
    specs = site_specs(model, Spec(name="decode", tokens=4, slots=2))
    assert [s.name for s in specs] == [
        f"{model}/{site}/decode" for site in ("qkv", "o", "gate_up", "down")
    ]
    assert [len(s.part_widths) for s in specs] == [3, 1, 2, 1]
    assert specs[3].d_in == specs[2].part_widths[0]


def test_experts_are_slots_and_choices_are_rows():
    workload = Spec(name="decode", tokens=32, slots=4)
    up, down = expert_specs("qwen3-30b-a3b", workload)
    assert (up.name, up.tokens, up.slots) == ("qwen3-30b-a3b/gate_up/decode", 256, 512)
    assert (up.d_in, up.part_widths) == (2048, (768, 768))
    assert (down.d_in, down.part_widths) == (768, (2048,))


def test_suites_have_names_of_their_own():
    names = [spec.name for suite in suites().values() for spec in suite]
    assert len(names) == len(set(names))


def test_ranks_differ_only_in_the_room_of_their_slots_and_in_one_rank():
    small_room, large_room, one_high = suites()["ranks"]
    assert (small_room.rank_axis, large_room.rank_axis) == (8, 256)
    assert set(small_room.ranks) == set(large_room.ranks) == {8}
    assert sorted(one_high.ranks) == [8] * 31 + [256]
    assert small_room.tokens == large_room.tokens == one_high.tokens == 32
