"""Ladders of shapes."""

import pytest

from lora_jax.errors import ConfigError
from lora_jax.serving.buckets import (
    check_ladder,
    length_ladder,
    row_ladder,
    smallest_that_holds,
    split_rows,
)


@pytest.mark.parametrize(
    ("longest", "ladder"),
    [(1, (1,)), (16, (16,)), (17, (16, 17)), (128, (16, 32, 64, 128))],
)
def test_lengths_double_up_to_the_longest(longest, ladder):
    assert length_ladder(longest) == ladder


@pytest.mark.parametrize("count", range(1, 40))
@pytest.mark.parametrize("ladder", [(1,), (1, 2), (1, 4, 16), (1, 4, 6)])
def test_row_buckets_hold_all_rows_and_waste_less_than_half(count, ladder):
    buckets = split_rows(count, ladder)
    assert set(buckets) <= set(ladder)
    assert count <= sum(buckets) <= 2 * count
    assert sum(buckets[:-1]) < count


def test_long_prompts_run_in_fewer_rows():
    assert row_ladder(64, 16) == (1, 4, 16)
    assert row_ladder(4096, 16) == (1,)


def test_a_ladder_is_sorted_and_unique():
    assert check_ladder([64, 16, 64], 64) == (16, 64)
    assert smallest_that_holds(17, (16, 64)) == 64


@pytest.mark.parametrize("lengths", [[], [0, 4], [65]])
def test_an_impossible_ladder_is_refused(lengths):
    with pytest.raises(ConfigError, match="between 1 and max_model_len=64"):
        check_ladder(lengths, 64)
