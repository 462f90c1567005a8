"""Writes to the key and value cache land where they should, and nowhere else."""

import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.models.cache import KVCache, insert, write_position


def full(batch: int, positions: int, value: float) -> KVCache:
    array = jnp.full((batch, 2, positions, 3), value)
    return KVCache((array,), (array + 0.5,))


def test_prefilled_rows_go_to_their_batch_rows_and_padding_rows_nowhere():
    cache, prefilled = full(4, 6, 0.0), full(3, 2, 1.0)
    after = insert(cache, jnp.array([2, -1, 4], jnp.int32), prefilled)
    expected = np.zeros((4, 2, 6, 3))
    expected[2, :, :2] = 1
    np.testing.assert_array_equal(after.keys[0], expected)
    np.testing.assert_array_equal(after.values[0], expected + 0.5)


def test_a_prompt_longer_than_the_cache_is_refused():
    with pytest.raises(ValueError, match=r"has 7 positions, the cache .* only 6"):
        insert(full(4, 6, 0.0), jnp.array([0], jnp.int32), full(1, 7, 1.0))


@pytest.mark.parametrize("positions", [[0, 5], [-1, 3], [6, -7], [2, 2]])
def test_each_row_is_written_at_its_own_position_only(positions):
    cache = np.zeros((2, 2, 6, 3), np.float32)
    new = np.arange(1, 13, dtype=np.float32).reshape(2, 2, 3)
    after = write_position(
        jnp.asarray(cache), jnp.array(positions, jnp.int32), jnp.asarray(new)
    )
    for row, position in enumerate(positions):
        if 0 <= position < 6:
            cache[row, :, position] = new[row]
    np.testing.assert_array_equal(after, cache)
