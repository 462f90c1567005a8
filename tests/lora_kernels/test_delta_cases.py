"""The lists of cases of `lora_delta`: every value of every factor is in each."""

import math

import pytest

from delta_cases import FACTORS, IDLE, covering_cases, multiplications, values_of


@pytest.mark.parametrize("limit", [math.inf, 2e7, 1e7])
def test_every_value_occurs_where_rows_are_adapted(limit):
    cases = covering_cases(limit=limit)
    assert max(map(multiplications, cases)) <= limit
    values = list(map(values_of, cases))
    idle = [any(case[name] == IDLE[name] for name in IDLE) for case in values]
    for name, wanted in FACTORS.items():
        busy = {
            case[name] for case, rests in zip(values, idle, strict=True) if not rests
        }
        assert busy == set(wanted) - {IDLE.get(name)}
    assert any(case["tokens"] == 0 for case in values)
    base = [case for case in values if case["distribution"] == "all_base"]
    assert any(case["tokens"] > 0 for case in base)


def test_every_rank_of_a_mix_is_some_slots():
    for spec in covering_cases():
        assert len(spec.ranks) <= spec.slots * len(spec.part_widths)


def test_numbers_of_tokens_can_be_chosen():
    cases = covering_cases(tokens=(7, 16))
    assert {spec.tokens for spec in cases} == {7, 16}
