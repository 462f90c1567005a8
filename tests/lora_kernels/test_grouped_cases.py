"""The lists of cases of `grouped_dot`: every value of every factor is in each."""

import math

import pytest

from grouped_cases import FACTORS, covering_cases, multiplications


@pytest.mark.parametrize(
    ("count", "limit"), [(24, math.inf), (24, 2e7), (12, math.inf)]
)
def test_every_value_occurs_where_pairs_have_kernels(count, limit):
    cases = covering_cases(count, limit=limit)
    assert len(cases) == count
    assert max(map(multiplications, cases)) <= limit
    local = [case for case in cases if case.spread != "all_remote"]
    assert len(local) < count
    for name, values in FACTORS.items():
        seen = {getattr(case, name) for case in local}
        assert seen == set(values) - {"all_remote"}
