"""The default model, whole: its answer, its tokenizer, and transformers' logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.models import (
    DEFAULT_MODEL,
    CausalLM,
    Tokenizer,
    empty_cache,
    insert,
    load_model,
    load_tokenizer,
    resolve_model,
)

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def smollm() -> CausalLM:
    return load_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEFAULT_MODEL)


def greedy(model: CausalLM, prompt: list[int], stop: frozenset[int]) -> list[int]:
    """Returns the prompt's greedy answer, in the second row of a batch of two."""
    _, prefilled = jax.jit(lambda model, x: model.prefill(x))(
        model, jnp.asarray([prompt[:-1]], jnp.int32)
    )
    cache = empty_cache(model.config, 2, 64, "float32")
    cache = insert(cache, jnp.array([1], jnp.int32), prefilled)

    @jax.jit
    def step(model, token, position, cache):
        tokens, positions = jnp.array([0, token]), jnp.array([-1, position])
        hidden, cache = model.decode(
            tokens.astype(jnp.int32), positions.astype(jnp.int32), cache
        )
        return jnp.argmax(model.logits(hidden)[1]), cache

    answer, token = [], prompt[-1]
    for position in range(len(prompt) - 1, 64):
        token, cache = step(model, token, position, cache)
        if int(token) in stop:
            break
        answer.append(int(token))
    return answer


def test_the_default_model_knows_the_capital_of_france(smollm, tokenizer):
    prompt = tokenizer.apply_chat_template(QUESTION)
    answer = greedy(smollm, prompt, tokenizer.eos_ids)
    assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_the_default_models_shape_is_smollm2_135m(smollm):
    config = smollm.config
    assert (config.num_hidden_layers, config.hidden_size) == (30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert (config.vocab_size, config.tie_word_embeddings) == (49152, True)
    assert (config.rotaries[0].theta, config.norm_eps) == (100000.0, 1e-5)


def test_the_default_tokenizer_follows_smollms_rules(tokenizer):
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_ids == {tokenizer.backend.token_to_id("<|im_end|>")}
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("In 2024, it's 3.5 km")]
    assert pieces == ["In", " ", "2", "0", "2", "4", ",", " it", "'s", " ", "3", ".",
                      "5", " km"]  # fmt: skip
    rendered = tokenizer.render_chat(QUESTION)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert rendered.endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.apply_chat_template(QUESTION)[:2] == [1, 9690]


@pytest.mark.parametrize(
    "text", ["naïve café", "日本語 🙂", "a\n\n\tb  c", "  leading", "x = 12**3\r\n"]
)
def test_the_default_tokenizer_gives_every_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.torch
def test_the_default_models_logits_equal_transformers(smollm, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model(DEFAULT_MODEL)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(QUESTION)
    rendered = theirs.apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True
    )
    assert theirs(rendered, add_special_tokens=False).input_ids == prompt
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt])).logits.numpy()
    logits = jax.jit(lambda model, x: model(x))(smollm, jnp.asarray([prompt]))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
