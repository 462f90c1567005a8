"""Poolings against their definitions, padding included."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.models.pooling import POOLINGS, folder_pooling, normalize

HIDDEN = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
LENGTHS = (5, 2, 1)
MASK = np.arange(5)[None] < np.array(LENGTHS)[:, None]
EXPECTED = {
    "mean": lambda row, length: row[:length].mean(axis=0),
    "cls": lambda row, length: row[0],
    "last": lambda row, length: row[length - 1],
}


@pytest.mark.parametrize("kind", POOLINGS)
@pytest.mark.parametrize("padding", [np.nan, 7.0])
def test_padding_never_reaches_a_pooled_vector(kind, padding):
    hidden = np.where(MASK[:, :, None], HIDDEN, padding).astype(np.float32)
    pooled = POOLINGS[kind](jnp.asarray(hidden), jnp.asarray(MASK))
    rows = zip(HIDDEN, LENGTHS, strict=True)
    expected = np.stack([EXPECTED[kind](row, length) for row, length in rows])
    np.testing.assert_allclose(pooled, expected, atol=1e-6)


def test_poolings_widen_bfloat16():
    for pool in POOLINGS.values():
        pooled = pool(jnp.asarray(HIDDEN, jnp.bfloat16), jnp.asarray(MASK))
        assert pooled.dtype == jnp.float32


def test_normalized_vectors_have_unit_length_and_zero_stays_zero():
    vectors = jnp.array([[3.0, 4.0], [0.0, 0.0]])
    np.testing.assert_allclose(normalize(vectors), [[0.6, 0.8], [0, 0]], atol=1e-6)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (None, None),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_max_tokens": True}, None),
    ],
)
def test_a_folder_may_say_its_pooling(tmp_path, values, kind):
    if values is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(values))
    assert folder_pooling(tmp_path) == kind
