"""The decoder against transformers, and its prefill and decode against itself whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax.models import CausalLM, config_from_dict, empty_cache, insert, load_model

TOLERANCE = 2e-4
"""Absolute, of float32 logits of order 1 to 10."""

SLIDING = {"sliding_window": 5}
QWEN_SLIDING = {
    "sliding_window": 5,
    "use_sliding_window": True,
    "max_window_layers": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}

PARTIAL = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
    }
}
LONGROPE = {
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0, 1.1, 1.3, 2.0],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
}
GEMMA2 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 5,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 4.0,
}
GEMMA3 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
}
GEMMA3_ROTARY = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

CASES = {
    "llama": ("llama", {}),
    "llama without groups": ("llama", {"num_key_value_heads": 4}),
    "llama with one key head": ("llama", {"num_key_value_heads": 1}),
    "llama with wide heads": ("llama", {"head_dim": 16}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama linear": ("llama", {"rope_parameters": LINEAR}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn with mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}},
    ),
    "llama yarn untruncated": (
        "llama",
        {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 4.0}},
    ),
    "llama with another activation": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral sliding": ("mistral", SLIDING),
    "qwen2": ("qwen2", {}),
    "qwen2 sliding": ("qwen2", QWEN_SLIDING),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "phi3": ("phi3", {"tie_word_embeddings": False}),
    "phi3 partly rotated": ("phi3", {**PARTIAL, **SLIDING}),
    "phi3 longrope": ("phi3", LONGROPE),
    "phi3 longrope with a factor": (
        "phi3",
        {"rope_parameters": {**LONGROPE["rope_parameters"], "attention_factor": 1.7}},
    ),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2 without caps": (
        "gemma2",
        {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3 stretched": ("gemma3_text", {**GEMMA3, "rope_parameters": GEMMA3_ROTARY}),
    "gpt2": ("gpt2", GPT2),
    "gpt2 untied": ("gpt2", {**GPT2, "tie_word_embeddings": False, "n_inner": 40}),
    "qwen3 sliding with biases": (
        "qwen3",
        {"head_dim": 16, "attention_bias": True, **QWEN_SLIDING},
    ),
}


def tiny(dtype: str = "float32", **changes: object) -> CausalLM:
    """Returns a random two-layer Llama with groups, wide heads and a window."""
    values = {
        "model_type": "mistral",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 6,
        **changes,
    }
    config = config_from_dict(values, origin="a test")
    abstract = nnx.eval_shape(lambda: CausalLM(config, dtype=dtype, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(
            random.normal(0.5 if x.ndim == 1 else 0, 0.2, x.shape), x.dtype
        ),
        abstract,
    )


forward = jax.jit(lambda model, *inputs: model(*inputs))
prefill = jax.jit(lambda model, tokens: model.prefill(tokens))
decode = jax.jit(lambda model, *inputs: model.decode(*inputs))
logits_of = jax.jit(lambda model, hidden: model.logits(hidden))


def some_tokens(rows: int, time: int) -> jax.Array:
    tokens = np.random.default_rng(3).integers(0, 64, (rows, time))
    return jnp.asarray(tokens, jnp.int32)


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(save_tiny, case):
    checkpoint = save_tiny(*CASES[case])
    model = load_model(checkpoint.folder)
    logits = np.asarray(forward(model, jnp.asarray(checkpoint.tokens)))
    assert np.abs(checkpoint.output).max() > 1
    np.testing.assert_allclose(
        logits[checkpoint.mask],
        checkpoint.output[checkpoint.mask],
        rtol=0,
        atol=TOLERANCE,
    )


def test_prefill_then_decode_equals_the_whole_forward():
    model, tokens = tiny(), some_tokens(3, 14)
    expected = np.asarray(forward(model, tokens))
    hidden, prefilled = prefill(model, tokens[:, :5])
    np.testing.assert_allclose(logits_of(model, hidden), expected[:, :5], atol=1e-5)
    cache = empty_cache(model.config, 3, 20, "float32")
    cache = insert(cache, jnp.arange(3, dtype=jnp.int32), prefilled)
    for position in range(5, 14):
        positions = jnp.full((3,), position, jnp.int32)
        hidden, cache = decode(model, tokens[:, position], positions, cache)
        np.testing.assert_allclose(
            logits_of(model, hidden), expected[:, position], atol=1e-5
        )


def test_rows_at_different_positions_decode_as_they_would_alone():
    model, tokens = tiny(), some_tokens(3, 12)
    lengths = jnp.array([4, 9, 6], jnp.int32)
    expected = np.asarray(forward(model, tokens))
    _, prefilled = prefill(model, tokens[:, :9])
    cache = insert(
        empty_cache(model.config, 3, 16, "float32"), jnp.arange(3), prefilled
    )
    for step in range(3):
        positions = lengths + step
        current = tokens[jnp.arange(3), positions]
        hidden, cache = decode(model, current, positions, cache)
        np.testing.assert_allclose(
            logits_of(model, hidden),
            expected[np.arange(3), np.asarray(positions)],
            atol=1e-5,
        )


def test_an_idle_row_writes_nothing_and_is_finite():
    model = tiny()
    cache = jax.tree.map(jnp.ones_like, empty_cache(model.config, 2, 8, "float32"))
    hidden, after = decode(
        model, jnp.zeros((2,), jnp.int32), jnp.array([-1, 3], jnp.int32), cache
    )
    assert np.isfinite(hidden).all()
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new[0], old[0])
        assert (np.asarray(new[1, :, 3]) != np.asarray(old[1, :, 3])).any()


def test_padding_on_the_right_changes_no_earlier_token():
    model, tokens = tiny(), some_tokens(2, 10)
    padded = jnp.concatenate([tokens, jnp.zeros((2, 6), jnp.int32)], axis=1)
    np.testing.assert_allclose(
        forward(model, padded)[:, :10], forward(model, tokens), atol=1e-6
    )


def test_given_positions_shift_only_the_rotary_angles():
    model, tokens = tiny(), some_tokens(2, 10)
    shifted = jnp.broadcast_to(jnp.arange(7, 17, dtype=jnp.int32), (2, 10))
    np.testing.assert_allclose(
        forward(model, tokens, shifted), forward(model, tokens), atol=1e-5
    )


def test_bfloat16_stays_close_to_float32():
    tokens = some_tokens(2, 12)
    wide, narrow = tiny(), tiny("bfloat16")
    hidden, cache = prefill(narrow, tokens)
    assert hidden.dtype == cache.keys[0].dtype == jnp.bfloat16
    logits = forward(narrow, tokens)
    assert logits.dtype == jnp.float32
    expected = forward(wide, tokens)
    gap = jnp.abs(logits - expected).max() / jnp.abs(expected).max()
    assert gap < 0.03


def test_a_donated_cache_is_written_in_place():
    model = tiny()
    graphdef, state = nnx.split(model)
    cache = empty_cache(model.config, 4, 128, "float32")

    def step(state, tokens, positions, cache):
        return nnx.merge(graphdef, state).decode(tokens, positions, cache)

    inputs = (state, jnp.zeros((4,), jnp.int32), jnp.arange(4, dtype=jnp.int32), cache)
    compiled = jax.jit(step, donate_argnums=3).lower(*inputs).compile()
    memory = compiled.memory_analysis()
    one_array = cache.keys[0].nbytes
    assert memory.alias_size_in_bytes >= 4 * one_array
    assert memory.temp_size_in_bytes < one_array


def test_parameter_paths_are_hugging_faces_with_fused_projections():
    paths = {
        ".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(tiny()))
    }
    layer = {
        "self_attn.qkv_proj.kernel",
        "self_attn.o_proj.kernel",
        "mlp.gate_up_proj.kernel",
        "mlp.down_proj.kernel",
        "input_layernorm.scale",
        "post_attention_layernorm.scale",
    }
    expected = {f"model.layers.{i}.{name}" for i in range(2) for name in layer}
    outside = {"model.embed_tokens.embedding", "model.norm.scale", "lm_head.kernel"}
    assert paths == expected | outside


def test_a_tied_model_has_no_head_of_its_own():
    model = tiny(tie_word_embeddings=True)
    assert not any(
        path[0] == "lm_head" for path, _ in nnx.to_flat_state(nnx.state(model))
    )
    hidden, _ = prefill(model, some_tokens(1, 3))
    table = model.model.embed_tokens.embedding[...]
    np.testing.assert_allclose(logits_of(model, hidden), hidden @ table.T, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 6), (2, 0)])
def test_no_rows_and_no_tokens_give_no_logits(shape):
    model = tiny()
    logits = model(jnp.zeros(shape, jnp.int32))
    assert logits.shape == (*shape, model.config.vocab_size)
