"""Attention against its definition, one query and one head at a time."""

import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.models.attend import (
    attend,
    cap,
    causal_attend,
    seen_in_cache,
    softmax_beside,
)

BATCH, TIME, HEADS, KV_HEADS, DIM = 2, 11, 4, 2, 3
SCALE = 0.7


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


Q = random(0, BATCH, TIME, HEADS, DIM)
K = random(1, BATCH, KV_HEADS, TIME, DIM)
V = random(2, BATCH, KV_HEADS, TIME, DIM)
SINKS = random(3, HEADS)


def defined(
    row: int,
    time: int,
    positions: list[int],
    softcap: float | None,
    sinks: np.ndarray | None,
):
    """Returns one query's answer by the formula, all heads side by side."""
    heads = []
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        scores = SCALE * K[row, kv, positions] @ Q[row, time, head]
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores)
        nothing = 0 if sinks is None else np.exp(sinks[head])
        heads.append(weights / (weights.sum() + nothing) @ V[row, kv, positions])
    return np.concatenate(heads)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("block", [1, 3, 4, 11, 50])
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_a_token_sees_itself_and_what_is_before_it(window, softcap, block, sinks):
    got = causal_attend(
        *map(jnp.asarray, (Q, K, V)),
        window=window,
        scale=SCALE,
        softcap=softcap,
        sinks=None if sinks is None else jnp.asarray(sinks),
        block=block,
    )
    for row in range(BATCH):
        for time in range(TIME):
            first = 0 if window is None else max(0, time - window + 1)
            seen = list(range(first, time + 1))
            expected = defined(row, time, seen, softcap, sinks)
            np.testing.assert_allclose(got[row, time], expected, atol=1e-5)


def test_a_token_sees_the_cache_up_to_its_position():
    seen = seen_in_cache(jnp.array([4, -1]), TIME, 3)
    expected = np.zeros((2, 1, TIME), bool)
    expected[0, 0, 2:5] = True
    expected[1, 0, 0] = True
    np.testing.assert_array_equal(seen, expected)
    inputs = map(jnp.asarray, (Q[:, 4:5], K, V))
    got = attend(*inputs, seen, scale=SCALE, softcap=None, sinks=None)
    expected = defined(0, 4, [2, 3, 4], None, None)
    np.testing.assert_allclose(got[0, 0], expected, atol=1e-5)


def test_a_sink_as_large_as_can_be_leaves_nothing_and_no_nan():
    scores = jnp.array([[1e30, -jnp.inf], [-1e30, 0.0]])
    beside = jnp.array([[3e38], [-jnp.inf]])
    np.testing.assert_array_equal(softmax_beside(scores, beside), [[0, 0], [0, 1]])


def test_a_cap_bounds_and_keeps_small_values():
    np.testing.assert_allclose(cap(jnp.array([1e9, -1e9]), 5.0), [5, -5])
    np.testing.assert_allclose(cap(jnp.array([0.01]), 5.0), [0.01], atol=1e-6)
