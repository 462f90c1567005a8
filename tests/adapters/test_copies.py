"""A copy of a base layer is told apart from another base."""

import ml_dtypes
import numpy as np
import pytest

from lora_jax.adapters.copies import ROWS, copy_base

BASE = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)


@pytest.mark.parametrize("served", ["float32", "float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("saved", ["float32", "float16", ml_dtypes.bfloat16])
def test_the_same_base_in_another_dtype_does_not_differ(saved, served):
    copy = copy_base(BASE.astype(ml_dtypes.bfloat16).astype(saved))
    assert copy.difference(BASE.astype(ml_dtypes.bfloat16).astype(served)) is None


def test_another_base_differs():
    assert "values differ" in copy_base(BASE).difference(BASE * 1.01)
    assert "values differ" in copy_base(BASE).difference(BASE[::-1])


def test_a_resized_vocabulary_differs():
    assert "shape (1000, 8), this (999, 8)" in copy_base(BASE).difference(BASE[:-1])


@pytest.mark.parametrize("rows", [0, 1, 2, ROWS, 1000])
def test_a_sample_has_first_and_last_row_and_bounded_size(rows):
    copy = copy_base(BASE[:rows])
    assert len(copy.rows) == min(rows, ROWS)
    assert copy.difference(BASE[:rows]) is None
