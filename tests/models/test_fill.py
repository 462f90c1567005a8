"""Every tensor of a checkpoint finds its place, or one error names all that do not."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from lora_jax.errors import ModelError
from lora_jax.models import CausalLM, load_model
from lora_jax.models.config import config_from_dict
from lora_jax.models.names import checkpoint_table

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "attention_bias": True,
}


def tensors(dtype=np.float32, **changes: object) -> dict[str, np.ndarray]:
    """Returns random values for every tensor that the config needs."""
    config = config_from_dict({**CONFIG, **changes}, origin="a test")
    model = nnx.eval_shape(
        lambda: CausalLM(config, dtype="float32", rngs=nnx.Rngs(params=0))
    )
    random = np.random.default_rng(0)
    return {
        name: random.normal(0, 1, target.shape).astype(dtype)
        for name, target in checkpoint_table(model).items()
    }


def save(folder, weights, **changes: object):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(weights, folder / "model.safetensors")
    return folder


def shapes_and_values(model) -> dict[str, np.ndarray]:
    return {
        ".".join(map(str, path)): np.asarray(variable.get_value(), np.float32)
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }


def test_fused_parameters_hold_their_parts_side_by_side(tmp_path):
    weights = tensors()
    found = shapes_and_values(load_model(save(tmp_path, weights)))
    at = "model.layers.1.self_attn"
    for kind, join in (("weight", lambda x: x.T), ("bias", lambda x: x)):
        parts = [join(weights[f"{at}.{p}_proj.{kind}"]) for p in "qkv"]
        name = {"weight": "kernel"}.get(kind, kind)
        expected = np.concatenate(parts, axis=-1)
        np.testing.assert_array_equal(found[f"{at}.qkv_proj.{name}"], expected)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_float_dtype_loads_as_the_asked_one(tmp_path, stored, dtype):
    weights = tensors(stored)
    model = load_model(save(tmp_path, weights), dtype)
    leaves = jax.tree.leaves(nnx.state(model))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(dtype)}
    expected = weights["model.norm.weight"].astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(
        shapes_and_values(model)["model.norm.scale"], expected
    )


def test_a_sharded_checkpoint_equals_a_single_file(tmp_path):
    weights = tensors()
    names = sorted(weights)
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    single = load_model(save(tmp_path / "one", weights))
    many = save(tmp_path / "many", {"unused.weight": weights[names[0]]})
    (many / "model.safetensors").unlink()
    shards = {f"model-{i}.safetensors": names[i::3] for i in range(3)}
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, many / file)
    index = {name: file for file, held in shards.items() for name in held}
    (many / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index})
    )
    sharded = shapes_and_values(load_model(many))
    for name, value in shapes_and_values(single).items():
        np.testing.assert_array_equal(sharded[name], value)


def test_all_tensors_that_do_not_fit_are_named_in_one_error(tmp_path):
    weights = tensors()
    del weights["model.layers.0.mlp.up_proj.weight"]
    del weights["model.layers.1.self_attn.k_proj.bias"]
    weights["model.layers.0.self_attn.q_proj.lora_A"] = np.ones(3, np.float32)
    weights["model.norm.weight"] = np.ones(5, np.float32)
    weights["model.layers.1.input_layernorm.weight"] = np.ones(16, np.int8)
    with pytest.raises(ModelError) as error:
        load_model(save(tmp_path, weights))
    for line in (
        "model.layers.0.mlp.up_proj.weight: missing",
        "model.layers.1.self_attn.k_proj.bias: missing",
        "model.layers.0.self_attn.q_proj.lora_A: not a tensor of this model",
        "model.norm.weight: shape [5], expected [16]",
        "model.layers.1.input_layernorm.weight: dtype I8, supported: F32, F16, BF16",
    ):
        assert line in str(error.value)


def test_a_long_list_of_faults_is_counted(tmp_path):
    weights = {name: w for name, w in tensors().items() if "layers" not in name}
    with pytest.raises(ModelError, match=r"\.\.\. and 10 more like it"):
        load_model(save(tmp_path, weights))


def test_a_tied_head_may_be_in_the_file_if_it_is_the_embedding(tmp_path):
    weights = tensors(tie_word_embeddings=True)
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    load_model(save(tmp_path, weights, tie_word_embeddings=True))
    weights["lm_head.weight"] += 1
    with pytest.raises(ModelError, match="differs from model"):
        load_model(save(tmp_path, weights, tie_word_embeddings=True))
    weights["lm_head.weight"] = weights["lm_head.weight"][:-1].copy()
    with pytest.raises(ModelError, match=r"lm_head.weight: shape \[23, 16\], expected"):
        load_model(save(tmp_path, weights, tie_word_embeddings=True))


def test_an_untied_model_without_a_head_says_what_to_set(tmp_path):
    weights = tensors(tie_word_embeddings=True)
    with pytest.raises(ModelError, match='"tie_word_embeddings": true'):
        load_model(save(tmp_path, weights))


def test_old_rotary_buffers_are_left(tmp_path):
    weights = tensors()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    load_model(save(tmp_path, weights))


def test_a_checkpoint_of_the_body_alone_may_leave_out_its_name(tmp_path):
    weights = tensors(tie_word_embeddings=True)
    short = {name.removeprefix("model."): value for name, value in weights.items()}
    load_model(save(tmp_path, short, tie_word_embeddings=True))
    short["model.norm.weight"] = short["norm.weight"]
    with pytest.raises(ModelError, match=r"norm\.weight: is in the file twice"):
        load_model(save(tmp_path, short, tie_word_embeddings=True))


def test_a_dtype_that_cannot_be_computed_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dtype 'float16' is not supported; use"):
        load_model(tmp_path, "float16")
