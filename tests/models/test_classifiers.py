"""Classification heads against transformers, on encoders and on decoders."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.errors import ModelError
from lora_jax.models import load_causal_lm, load_model

TOLERANCE = 2e-4
LABELS = {"id2label": {0: "bad", 1: "so-so", 2: "good"}}

CASES = {
    "bert": ("bert", {}),
    "roberta": ("roberta", {"pad_token_id": 1}),
    "xlm-roberta": ("xlm-roberta", {"pad_token_id": 1}),
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_scores_equal_transformers(save_tiny, case):
    model_type, changes = CASES[case]
    checkpoint = save_tiny(
        model_type,
        {**changes, **LABELS},
        auto="AutoModelForSequenceClassification",
    )
    model = load_model(checkpoint.folder)
    assert model.config.labels == ("bad", "so-so", "good")
    inputs = (checkpoint.tokens, checkpoint.mask, checkpoint.token_types)
    scores = jax.jit(lambda model, *inputs: model(*inputs))(
        model, *map(jnp.asarray, inputs)
    )
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, checkpoint.output, rtol=0, atol=TOLERANCE)


@pytest.mark.torch
def test_a_classifier_is_no_language_model(save_tiny):
    checkpoint = save_tiny("bert", LABELS, auto="AutoModelForSequenceClassification")
    with pytest.raises(ModelError, match="is a BertClassifier, which generates no te"):
        load_causal_lm(checkpoint.folder)
