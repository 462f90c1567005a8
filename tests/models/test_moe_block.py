"""Models with experts against transformers: whole, step by step, in both layouts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from lora_jax.errors import ModelError
from lora_jax.models import CausalLM, empty_cache, insert, load_model

TOLERANCE = 2e-4
"""Absolute, of float32 logits of order 1 to 10; as in `test_decoder.py`."""

MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN2 = {
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
QWEN3 = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OLMOE = {"num_experts": 8, "num_experts_per_tok": 3}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
GPT_OSS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 16,
    "sliding_window": 5,
    "rope_parameters": YARN,
}
WINDOWS = {"sliding_window": 5, "use_sliding_window": True}

CASES = {
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral with one expert a token": (
        "mixtral",
        {**MIXTRAL, "num_local_experts": 4, "num_experts_per_tok": 1},
    ),
    "mixtral sliding and tied": (
        "mixtral",
        {**MIXTRAL, "sliding_window": 5, "tie_word_embeddings": True},
    ),
    "mixtral with all experts": ("mixtral", {**MIXTRAL, "num_experts_per_tok": 8}),
    "qwen2_moe": ("qwen2_moe", QWEN2),
    "qwen2_moe normalised": ("qwen2_moe", {**QWEN2, "norm_topk_prob": True}),
    "qwen2_moe partly dense": ("qwen2_moe", {**QWEN2, "decoder_sparse_step": 2}),
    "qwen2_moe sliding": ("qwen2_moe", {**QWEN2, **WINDOWS, "max_window_layers": 1}),
    "qwen3_moe": ("qwen3_moe", {**QWEN3, "head_dim": 16}),
    "qwen3_moe with many experts": (
        "qwen3_moe",
        {**QWEN3, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
    "qwen3_moe partly dense": ("qwen3_moe", {**QWEN3, "mlp_only_layers": [0]}),
    "qwen3_moe sliding with biases": (
        "qwen3_moe",
        {**QWEN3, **WINDOWS, "attention_bias": True},
    ),
    "olmoe": ("olmoe", OLMOE),
    "olmoe clipped": ("olmoe", {**OLMOE, "clip_qkv": 0.5, "norm_topk_prob": True}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss with all experts": ("gpt_oss", {**GPT_OSS, "num_experts_per_tok": 8}),
}
ONE_OF_EACH = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe clipped", "gpt_oss")

forward = jax.jit(lambda model, tokens: model(tokens))
prefill = jax.jit(lambda model, tokens: model.prefill(tokens))
decode = jax.jit(lambda model, *inputs: model.decode(*inputs))
logits_of = jax.jit(lambda model, hidden: model.logits(hidden))


def same(found, expected) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def parameters(model: CausalLM) -> dict[str, np.ndarray]:
    return {
        ".".join(map(str, path)): np.asarray(variable.get_value())
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(save_tiny, case):
    checkpoint = save_tiny(*CASES[case])
    logits = forward(load_model(checkpoint.folder), jnp.asarray(checkpoint.tokens))
    assert np.abs(checkpoint.output).max() > 1
    same(np.asarray(logits)[checkpoint.mask], checkpoint.output[checkpoint.mask])


@pytest.mark.torch
@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_prefill_then_decode_equals_transformers(save_tiny, case):
    checkpoint = save_tiny(*CASES[case])
    model, tokens = load_model(checkpoint.folder), jnp.asarray(checkpoint.tokens)
    hidden, prefilled = prefill(model, tokens[:, :8])
    same(logits_of(model, hidden), checkpoint.output[:, :8])
    # The second row starts further on and the third, of no text, is idle.
    cache = empty_cache(model.config, 3, 24, "float32")
    cache = insert(cache, jnp.arange(2, dtype=jnp.int32), prefilled)
    lengths = np.array([8, 6])
    for step in range(7):
        at = lengths + step
        current = jnp.asarray([*checkpoint.tokens[[0, 1], at], 0], jnp.int32)
        positions = jnp.asarray([*at, -1], jnp.int32)
        hidden, cache = decode(model, current, positions, cache)
        assert np.isfinite(hidden).all()
        same(logits_of(model, hidden)[:2], checkpoint.output[[0, 1], at])


@pytest.mark.torch
@pytest.mark.parametrize(
    "case", ["mixtral", "qwen2_moe", "qwen3_moe partly dense", "olmoe"]
)
def test_both_layouts_of_a_checkpoint_load_the_same_model(save_tiny, case):
    apart = save_tiny(*CASES[case])
    fused = save_tiny(*CASES[case], save_original_format=False)
    assert any(".experts.3." in name for name in names(apart.folder))
    assert any(name.endswith(".experts.gate_up_proj") for name in names(fused.folder))
    expected = parameters(load_model(apart.folder))
    for path, value in parameters(load_model(fused.folder)).items():
        np.testing.assert_array_equal(value, expected.pop(path))
    assert not expected


def names(folder) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


@pytest.mark.torch
def test_the_newer_names_of_mixtral_load_one_by_one_too(save_tiny, tmp_path):
    old = save_tiny(*CASES["mixtral"])
    tensors = load_file(old.folder / "model.safetensors")
    newer = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
    renamed = {}
    for name, value in tensors.items():
        for before, after in {**newer, "block_sparse_moe": "mlp"}.items():
            name = name.replace(before, after)
        renamed[name] = value
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((old.folder / "config.json").read_bytes())
    expected = parameters(load_model(old.folder))
    for path, value in parameters(load_model(tmp_path)).items():
        np.testing.assert_array_equal(value, expected[path])


@pytest.mark.torch
def test_paths_are_hugging_faces_with_fused_experts(save_tiny):
    model = load_model(save_tiny(*CASES["qwen2_moe"]).folder)
    prefix = "model.layers.1.mlp."
    found = {
        path.removeprefix(prefix): value.shape
        for path, value in parameters(model).items()
        if path.startswith(prefix)
    }
    assert found == {
        "gate.kernel": (32, 8),
        "experts.gate_up_proj.kernel": (8, 32, 48),
        "experts.down_proj.kernel": (8, 24, 32),
        "shared_expert.gate_up_proj.kernel": (32, 80),
        "shared_expert.down_proj.kernel": (40, 32),
        "shared_expert_gate.kernel": (32, 1),
    }


@pytest.mark.torch
def test_columns_of_gpt_oss_are_put_side_by_side(save_tiny):
    checkpoint = save_tiny(*CASES["gpt_oss"])
    tensors = load_file(checkpoint.folder / "model.safetensors")
    found = parameters(load_model(checkpoint.folder))
    at = "model.layers.0.mlp.experts.gate_up_proj"
    for ours, theirs in ((f"{at}.kernel", at), (f"{at}.bias", f"{at}_bias")):
        gate, up = np.split(found[ours], 2, axis=-1)
        np.testing.assert_array_equal(gate, tensors[theirs][..., ::2])
        np.testing.assert_array_equal(up, tensors[theirs][..., 1::2])
    assert found["model.layers.0.mlp.router.bias"].shape == (8,)
    assert found["model.layers.0.self_attn.sinks"].shape == (4,)


def broken(folder, tmp_path, change) -> None:
    """Loads a copy of a checkpoint whose tensors `change` has changed."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    load_model(tmp_path)


@pytest.mark.torch
def test_all_tensors_that_do_not_fit_are_named_in_one_error(save_tiny, tmp_path):
    at = "model.layers.1.mlp.experts"

    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors[f"{at}.5.up_proj.weight"]
        tensors[f"{at}.8.up_proj.weight"] = tensors[f"{at}.7.up_proj.weight"]
        tensors[f"{at}.0.down_proj.weight"] = np.ones((32, 23), np.float32)
        tensors["model.layers.0.mlp.experts.down_proj"] = np.ones(3, np.float32)

    with pytest.raises(ModelError) as error:
        broken(save_tiny(*CASES["qwen3_moe"]).folder, tmp_path, change)
    for line in (
        f"{at}.5.up_proj.weight: missing",
        f"{at}.8.up_proj.weight: not a tensor of this model",
        f"{at}.0.down_proj.weight: shape [32, 23], expected [32, 24]",
        "model.layers.0.mlp.experts.down_proj: not a tensor of this model",
    ):
        assert line in str(error.value)


@pytest.mark.torch
def test_experts_that_are_not_there_at_all_are_missed_in_one_tensor(
    save_tiny, tmp_path
):
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.0.mlp.experts.gate_up_proj"]

    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.gate_up_proj: mis"):
        broken(save_tiny(*CASES["gpt_oss"]).folder, tmp_path, change)


@pytest.mark.torch
def test_tensors_of_mxfp4_say_what_to_do(save_tiny, tmp_path):
    at = "model.layers.0.mlp.experts.gate_up_proj"

    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors[at]
        tensors[f"{at}_blocks"] = np.ones((8, 96, 1, 16), np.uint8)
        tensors[f"{at}_scales"] = np.ones((8, 96, 1), np.uint8)

    with pytest.raises(ModelError, match=r"_blocks: mxfp4 weights are not supported"):
        broken(save_tiny(*CASES["gpt_oss"]).folder, tmp_path, change)


@pytest.mark.torch
@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_padding_on_the_right_changes_no_earlier_token(save_tiny, case):
    checkpoint = save_tiny(*CASES[case])
    model, tokens = load_model(checkpoint.folder), jnp.asarray(checkpoint.tokens)
    other = tokens.at[:, 10:].set(7)
    np.testing.assert_allclose(
        forward(model, other)[:, :10], forward(model, tokens)[:, :10], atol=1e-6
    )


@pytest.mark.torch
def test_another_text_and_its_other_experts_compile_nothing(save_tiny):
    model = load_model(save_tiny(*CASES["mixtral"]).folder)
    step = jax.jit(lambda model, tokens: model(tokens))
    for shift in range(3):
        step(model, (jnp.arange(12, dtype=jnp.int32) * 5 + shift)[None] % 96)
    assert step._cache_size() == 1


@pytest.mark.torch
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_bfloat16_stays_close_to_float32(save_tiny, family):
    checkpoint = save_tiny(*CASES[f"{family} with all experts"])
    tokens = jnp.asarray(checkpoint.tokens)
    # With all experts chosen no rounding can change the choice.
    narrow = load_model(checkpoint.folder, "bfloat16")
    hidden, cache = prefill(narrow, tokens)
    assert hidden.dtype == cache.keys[0].dtype == jnp.bfloat16
    logits = forward(narrow, tokens)
    gap = np.abs(logits - checkpoint.output)[checkpoint.mask].max()
    assert gap / np.abs(checkpoint.output).max() < 0.03


@pytest.mark.torch
def test_a_classifier_may_have_experts(save_tiny):
    checkpoint = save_tiny(
        "mixtral",
        {**MIXTRAL, "num_labels": 3},
        auto="AutoModelForSequenceClassification",
    )
    values = json.loads((checkpoint.folder / "config.json").read_text())
    assert values["architectures"] == ["MixtralForSequenceClassification"]
    model = load_model(checkpoint.folder)
    scores = model(jnp.asarray(checkpoint.tokens), jnp.asarray(checkpoint.mask))
    same(scores, checkpoint.output)
