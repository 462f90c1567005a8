"""Decoders cut over two and four devices against the same decoders on one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax import LoRAConfig, LRUCacheLoRAModelManager
from lora_jax.errors import ModelError
from lora_jax.models import CausalLM, config_from_dict, shard_experts, shard_tensors
from lora_jax.models.quantize import quantize
from tiny_llama import CONFIG

TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}
"""Of logits of order 30."""

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 64,
}
MIXTRAL = {
    **CONFIG,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN2 = {**CONFIG, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
EVEN = {"vocab_size": 64, "num_hidden_layers": 1}
ONE_KEY_HEAD = {**EVEN, "num_key_value_heads": 1}
OWN_HEAD = {**EVEN, "tie_word_embeddings": False}


def mesh(shape, names):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, devices=devices)


def build(config, **changes):
    values = {**config, **changes}
    model = CausalLM(
        config_from_dict(values, origin="tiny"), dtype="float32", rngs=nnx.Rngs(0)
    )
    body = model.body
    table = body.embed_tokens if model.config.rotaries else body.wte
    table.embedding.set_value(table.embedding[...] * 6)
    return model


def tokens():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, 61, (3, 7)), jnp.int32)


def logits(model, *, jit):
    if not jit:
        return np.asarray(model(tokens()))
    graphdef, state = nnx.split(model)
    step = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    return np.asarray(step(state, tokens()))


CASES = {
    "llama": (CONFIG, EVEN),
    "a vocabulary that does not divide": (CONFIG, {"num_hidden_layers": 1}),
    "fewer key heads than devices": (CONFIG, ONE_KEY_HEAD),
    "a head of its own": (CONFIG, OWN_HEAD),
    "biases": (QWEN2, EVEN),
    "gpt2": (GPT2, {}),
}


@pytest.mark.parametrize(
    ("name", "devices"), [("llama", 2), *((name, 4) for name in CASES)]
)
def test_a_cut_decoder_gives_what_it_gives_on_one_device(name, devices):
    config, changes = CASES[name]
    expected = logits(build(config, **changes), jit=True)
    model = build(config, **changes)
    shard_tensors(model, mesh((devices,), ("tensor",)))
    for jit in (True, False):
        np.testing.assert_allclose(logits(model, jit=jit), expected, **TOLERANCE)
    assert np.abs(expected).max() > 3


SHARES = {
    "model.embed_tokens.embedding": (16, 32),
    "model.layers.0.self_attn.qkv_proj.kernel": (32, 16),
    "model.layers.0.self_attn.qkv_proj.bias": (16,),
    "model.layers.0.self_attn.o_proj.kernel": (8, 32),
    "model.layers.0.mlp.gate_up_proj.kernel": (32, 24),
    "model.layers.0.mlp.down_proj.kernel": (12, 32),
    "model.layers.0.input_layernorm.scale": (32,),
    "model.layers.0.post_attention_layernorm.scale": (32,),
    "model.norm.scale": (32,),
    "lm_head.kernel": (32, 16),
}


def shares(model):
    return {
        ".".join(map(str, path)): {s.data.shape for s in leaf.addressable_shards}
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def test_each_device_holds_its_share_of_the_kernels():
    model = build(QWEN2, **OWN_HEAD)
    shard_tensors(model, mesh((4,), ("tensor",)))
    assert shares(model) == {name: {shape} for name, shape in SHARES.items()}


def test_beside_an_axis_of_experts():
    expected = logits(build(MIXTRAL, **EVEN), jit=True)
    model, over = build(MIXTRAL, **EVEN), mesh((2, 2), ("expert", "tensor"))
    shard_experts(model, over)
    shard_tensors(model, over)
    np.testing.assert_allclose(logits(model, jit=True), expected, **TOLERANCE)
    found = shares(model)
    assert found["model.layers.0.self_attn.o_proj.kernel"] == {(16, 32)}
    assert found["model.layers.0.mlp.experts.down_proj.kernel"] == {(2, 48, 32)}


def wrapped():
    model = build(CONFIG)
    LRUCacheLoRAModelManager(model, LoRAConfig())
    return model


def quantized():
    model = build(CONFIG)
    quantize(model, "int8")
    return model


def spread(names=("expert",), shape=(2,)):
    model = build(MIXTRAL, **EVEN)
    shard_experts(model, mesh(shape, names))
    return model


@pytest.mark.parametrize(
    ("model", "axis", "text"),
    [
        (lambda: build(CONFIG), "model", r"no axis 'model', only \('tensor',\)"),
        (lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "tensor", "no decoder of this"),
        (wrapped, "tensor", "qkv_proj.lora_slots: is no parameter.* before a LoRA"),
        pytest.param(
            quantized,
            "tensor",
            "self_attn.o_proj: is quantised",
            marks=pytest.mark.filterwarnings("ignore::DeprecationWarning"),
        ),
        (lambda: build(MIXTRAL), "tensor", "mlp.experts: experts are not cut; spread"),
        (spread, "tensor", "its experts are spread over 'expert' of Mesh"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(model, axis, text):
    with pytest.raises(ModelError, match=text):
        shard_tensors(model(), mesh((2,), ("tensor",)), axis)


def test_every_width_that_does_not_divide_is_named_and_nothing_changes():
    model = build(CONFIG, num_hidden_layers=1)
    before = jax.tree.leaves(nnx.state(model))
    with pytest.raises(ModelError, match="cannot be cut") as caught:
        shard_tensors(model, mesh((3,), ("tensor",)))
    text = str(caught.value)
    assert "self_attn.qkv_proj: a width of 64 is no multiple of the 3 devices" in text
    assert "self_attn.o_proj: a width of 32" in text
    assert "down_proj" not in text
    after = jax.tree.leaves(nnx.state(model))
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_the_configuration_stays_as_it_is():
    model = build(CONFIG)
    before = dataclasses.asdict(model.config)
    shard_tensors(model, mesh((2,), ("tensor",)))
    assert dataclasses.asdict(model.config) == before
