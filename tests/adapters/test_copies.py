"""A copy of a base layer is told apart from another base."""

import ml_dtypes
import numpy as np
import pytest

from lora_jax.adapters.copies import ROWS, copy_base


def difference(copy, weight):
    return copy.difference(weight)


BASE = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)


@pytest.mark.parametrize("served", ["float32", "float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("saved", ["float32", "float16", ml_dtypes.bfloat16])
def test_the_same_base_in_another_dtype_does_not_differ(saved, served):
    base = BASE.astype(ml_dtypes.bfloat16)
    assert difference(copy_base(base.astype(saved)), base.astype(served)) is None


def test_another_base_differs():
    assert "values differ" in difference(copy_base(BASE), BASE * 1.01)
    assert "values differ" in difference(copy_base(BASE), BASE[::-1])


def test_a_resized_vocabulary_differs():
    text = difference(copy_base(BASE), BASE[:-1])
    assert "shape (1000, 8), the base's (999, 8)" in text


@pytest.mark.parametrize("rows", [0, 1, 2, ROWS, 1000])
def test_a_sample_has_first_and_last_row_and_bounded_size(rows):
    copy = copy_base(BASE[:rows])
    assert len(copy.rows) == min(rows, ROWS)
    assert difference(copy, BASE[:rows]) is None


def test_a_jax_array_is_compared_by_its_rows():
    import jax.numpy as jnp

    assert difference(copy_base(BASE), jnp.asarray(BASE)) is None
    assert "values differ" in difference(copy_base(BASE), jnp.asarray(BASE + 1))
