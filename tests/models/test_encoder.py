"""Encoders against transformers, and the real MiniLM."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.models import (
    body_of,
    load_model,
    load_tokenizer,
    normalize,
    resolve_model,
)
from lora_jax.models.pooling import folder_pooling, mean_pool

TOLERANCE = 2e-4

CASES = {
    "bert": ("bert", {}, "AutoModel"),
    "bert with a token head": ("bert", {}, "AutoModelForMaskedLM"),
    "roberta": ("roberta", {"type_vocab_size": 2, "pad_token_id": 1}, "AutoModel"),
    "llama": ("llama", {}, "AutoModel"),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 5}, "AutoModel"),
    "gpt2": (
        "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        "AutoModel",
    ),
    "xlm-roberta": ("xlm-roberta", {"pad_token_id": 1}, "AutoModel"),
}

forward = jax.jit(lambda model, *inputs: model(*inputs))


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_hidden_states_equal_transformers(save_tiny, case):
    model_type, changes, auto = CASES[case]
    checkpoint = save_tiny(model_type, changes, auto=auto)
    model = load_model(checkpoint.folder)
    assert body_of(model) is model
    inputs = (checkpoint.tokens, checkpoint.mask, checkpoint.token_types)
    hidden = forward(model, *map(jnp.asarray, inputs))
    if auto == "AutoModel":
        expected = checkpoint.output
    else:
        expected = _hidden_states(checkpoint)
    np.testing.assert_allclose(
        np.asarray(hidden)[checkpoint.mask],
        expected[checkpoint.mask],
        rtol=0,
        atol=TOLERANCE,
    )


def _hidden_states(checkpoint) -> np.ndarray:
    import torch
    from transformers import AutoModel

    body = AutoModel.from_pretrained(checkpoint.folder).eval()
    with torch.no_grad():
        output = body(
            torch.tensor(checkpoint.tokens),
            attention_mask=torch.tensor(checkpoint.mask),
            token_type_ids=torch.tensor(checkpoint.token_types),
        )
    return output.last_hidden_state.numpy()


@pytest.mark.torch
def test_padding_changes_nothing_and_an_empty_row_is_finite(save_tiny):
    checkpoint = save_tiny("roberta", {"pad_token_id": 1}, auto="AutoModel")
    model = load_model(checkpoint.folder)
    tokens, mask = jnp.asarray(checkpoint.tokens), jnp.asarray(checkpoint.mask)
    padded = forward(model, tokens, mask)[1, :13]
    alone = forward(model, tokens[1:, :13], mask[1:, :13])[0]
    np.testing.assert_allclose(padded, alone, atol=1e-5)
    assert np.isfinite(forward(model, tokens, jnp.zeros_like(mask))).all()


@pytest.mark.torch
def test_minilm_embeds_as_transformers_and_knows_what_is_alike():
    import torch
    from transformers import AutoModel

    folder = resolve_model("all-minilm-l6-v2")
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Stocks fell."]
    rows = [tokenizer.encode(text) for text in texts]
    time = max(map(len, rows))
    tokens = np.array([row + [0] * (time - len(row)) for row in rows], np.int32)
    mask = np.arange(time)[None] < np.array([[len(row)] for row in rows])
    hidden = forward(model, jnp.asarray(tokens), jnp.asarray(mask))
    oracle = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = oracle(torch.tensor(tokens), attention_mask=torch.tensor(mask))[0]
    np.testing.assert_allclose(
        np.asarray(hidden)[mask], expected.numpy()[mask], rtol=0, atol=TOLERANCE
    )
    assert folder_pooling(folder) == "mean"
    vectors = np.asarray(normalize(mean_pool(hidden, jnp.asarray(mask))))
    likeness = vectors @ vectors.T
    assert likeness[0, 1] > 0.5 > likeness[0, 2]
