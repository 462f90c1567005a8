"""Sampling against its meaning, computed with NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.serving.requests import SamplingParams
from lora_jax.serving.rows import RowFacts, pack_rows
from lora_jax.serving.sampling import sample

VOCAB = 32


def draw(logits, options, steps=None):
    """One token for each row of `logits`."""
    steps = [0] * len(options) if steps is None else steps
    rows = pack_rows(
        [
            RowFacts(row, step=step, sampling=option)
            for row, (option, step) in enumerate(zip(options, steps, strict=True))
        ]
    )
    return np.asarray(jax.jit(lambda x, r: sample(x, r.sampling))(logits, rows))


def random_logits(rows, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(rows, VOCAB)) * 2, jnp.float32)


def allowed(logits, temperature, top_k, top_p):
    """Tokens that the options keep, and their probabilities."""
    scaled = np.asarray(logits, np.float64) / temperature
    order = np.argsort(-scaled)
    keep = order[: top_k or VOCAB]
    chances = np.exp(scaled[keep] - scaled[keep].max())
    chances /= chances.sum()
    before = np.cumsum(chances) - chances
    keep, chances = keep[before < top_p], chances[before < top_p]
    return dict(zip(keep.tolist(), (chances / chances.sum()).tolist(), strict=True))


def test_temperature_zero_takes_the_most_likely_token():
    logits = random_logits(4)
    tokens = draw(logits, [SamplingParams()] * 4)
    np.testing.assert_array_equal(tokens, np.argmax(logits, -1))


def test_the_first_of_equal_logits_is_taken_and_a_token_of_the_vocabulary_always():
    rows = np.zeros((5, 6), np.float32)
    rows[0, [2, 4]] = 1
    rows[1] = -np.inf
    rows[2, 5] = np.inf
    rows[3] = np.nan
    rows[4, 3] = np.nan
    tokens = draw(jnp.asarray(rows), [SamplingParams()] * 5)
    np.testing.assert_array_equal(tokens, [2, 0, 5, 0, 0])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 5, 1.0), (1.0, 0, 0.7), (1.5, 8, 0.8)],
)
def test_frequencies_follow_the_filtered_softmax(temperature, top_k, top_p):
    draws = 4000
    logits = random_logits(1)
    options = [
        SamplingParams(temperature, top_k, top_p, seed=seed) for seed in range(draws)
    ]
    tokens = draw(jnp.tile(logits, (draws, 1)), options)
    expected = allowed(logits[0], temperature, top_k, top_p)
    assert set(tokens.tolist()) <= set(expected)
    found = np.bincount(tokens, minlength=VOCAB) / draws
    for token, chance in expected.items():
        assert abs(found[token] - chance) < 4 * np.sqrt(chance / draws) + 1e-3


def test_a_draw_depends_on_its_own_seed_and_step_only():
    logits = random_logits(6)
    options = [
        SamplingParams(0.0),
        SamplingParams(1.0, seed=1),
        SamplingParams(1.0, top_k=3, seed=2**32 - 1),
        SamplingParams(0.8, top_p=0.5, seed=3),
        SamplingParams(1.3, seed=4),
        SamplingParams(1.0, seed=1),
    ]
    steps = [0, 5, 2, 9, 1, 6]
    together = draw(logits, options, steps)
    for row in range(6):
        alone = draw(logits[row : row + 1], [options[row]], steps[row : row + 1])
        assert alone[0] == together[row]


def test_steps_and_seeds_give_other_draws():
    logits = jnp.zeros((64, VOCAB), jnp.float32)
    seeds = draw(logits, [SamplingParams(1.0, seed=seed) for seed in range(64)])
    steps = draw(logits, [SamplingParams(1.0, seed=0)] * 64, list(range(64)))
    assert len(set(seeds.tolist())) > 10
    assert len(set(steps.tolist())) > 10


def test_top_k_one_and_a_tiny_top_p_are_greedy():
    logits = random_logits(2)
    options = [SamplingParams(5.0, top_k=1), SamplingParams(5.0, top_p=1e-6)]
    np.testing.assert_array_equal(draw(logits, options), np.argmax(logits, -1))


def test_options_do_not_recompile():
    logits = random_logits(2)
    program = jax.jit(lambda x, r: sample(x, r.sampling))
    for options in (SamplingParams(), SamplingParams(1.0, 3, 0.5, 9)):
        program(logits, pack_rows([RowFacts(0, sampling=options)] * 2))
    assert program._cache_size() == 1
