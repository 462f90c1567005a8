"""Packing row facts into two arrays."""

import numpy as np

from lora_jax.serving.requests import SamplingParams
from lora_jax.serving.rows import RowFacts, pack_rows


def test_facts_come_back_by_name():
    options = SamplingParams(0.5, 7, 0.25, seed=2**32 - 2)
    rows = pack_rows([RowFacts(3, 10, 2, 6, 4, options), RowFacts(1)])
    np.testing.assert_array_equal(rows.row, [3, 1])
    np.testing.assert_array_equal(rows.position, [10, -1])
    np.testing.assert_array_equal(rows.slot, [2, -1])
    np.testing.assert_array_equal(rows.start, [6, 0])
    sampling = rows.sampling
    np.testing.assert_array_equal(sampling.step, [4, 0])
    np.testing.assert_array_equal(sampling.top_k, [7, 0])
    np.testing.assert_array_equal(sampling.temperature, np.float32([0.5, 0.0]))
    np.testing.assert_array_equal(sampling.top_p, np.float32([0.25, 1.0]))
    np.testing.assert_array_equal(sampling.seed.view(np.uint32), [2**32 - 2, 0])
    assert rows.integers.dtype == np.int32
    assert rows.reals.dtype == np.float32
