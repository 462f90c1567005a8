"""LoRA on quantised linear layers: the oracle merges into the dequantised kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax import LoRAConfig, LoRAMapping, LRUCacheLoRAModelManager
from lora_jax.adapters import DoRA
from lora_jax.errors import ModelError
from lora_jax.models.quantize import dequantized, quantize
from tiny_llama import Oracle, tiny_adapter, tiny_model

# qwix 0.1.8 looks at every attribute of a module, deprecated ones included.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LINEAR = {
    "self_attn": ("qkv_proj", "o_proj"),
    "mlp": ("gate_up_proj", "down_proj"),
}
PROMPT = (1, 2, 3, 9, 4)


def _linear_layers(model):
    return [
        getattr(getattr(layer, block), name)
        for layer in model.model.layers
        for block, names in LINEAR.items()
        for name in names
    ]


def _dense_copy(quantized):
    """A float model with the kernels that the quantised one multiplies by."""
    dense = tiny_model()
    for own, theirs in zip(
        _linear_layers(dense), _linear_layers(quantized), strict=True
    ):
        own.kernel.set_value(dequantized(theirs))
    return dense


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_rows_equal_the_oracle_on_the_dequantised_base(kind):
    model = tiny_model()
    exact = Oracle(model)
    quantize(model, kind)
    oracle = Oracle(_dense_copy(model))
    assert np.abs(oracle.logits(PROMPT, None) - exact.logits(PROMPT, None)).max() > 1e-2
    manager = LRUCacheLoRAModelManager(model, LoRAConfig(max_loras=2, max_lora_rank=8))
    adapters = {0: None, 1: tiny_adapter("a", 1), 2: tiny_adapter("b", 2)}
    for number in (1, 2):
        adapter = dataclasses.replace(adapters[number], id=number)
        manager.add_adapter(adapter)
        manager.activate_adapter(number)
    ids = [number for number in adapters for _ in PROMPT]
    manager.set_adapter_mapping(LoRAMapping(ids, list(adapters)))
    got = np.asarray(model(jnp.asarray([PROMPT] * len(adapters))))
    answers = [oracle.logits(PROMPT, adapter) for adapter in adapters.values()]
    assert np.abs(answers[0] - answers[1]).max() > 0.1
    assert np.abs(answers[1] - answers[2]).max() > 0.1
    np.testing.assert_allclose(got, answers, atol=1e-3)
    factors = manager.bank.arrays["model.layers.0.mlp.down_proj"]["a"]
    assert factors.dtype == jnp.float32


def test_the_quantised_kernel_is_small():
    model = tiny_model()
    quantize(model, "int8")
    layer = model.model.layers[0].mlp.down_proj
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param))}
    assert kinds == {"int8", "float32"}


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_dora_takes_its_norm_from_the_dequantised_kernel(kind):
    model = tiny_model()
    quantize(model, kind)
    name = "model.layers.1.mlp.down_proj"
    pair = tiny_adapter("a", 1).parts[name]
    magnitude = np.linspace(0.5, 2, 32, dtype=np.float32)
    kernel = np.asarray(dequantized(model.model.layers[1].mlp.down_proj), np.float64)
    exact = np.asarray(tiny_model().model.layers[1].mlp.down_proj.kernel[...])
    merged = kernel + pair.scale * (pair.b.astype(np.float64) @ pair.a).T
    merged *= magnitude / np.linalg.norm(merged, axis=0)
    manager = LRUCacheLoRAModelManager(model, LoRAConfig(max_lora_rank=8))
    adapter = dataclasses.replace(
        tiny_adapter("a", 1), id=1, parts={name: DoRA(pair, magnitude)}
    )
    manager.add_adapter(adapter)
    manager.activate_adapter(1)
    manager.set_adapter_mapping(LoRAMapping([1, 0, 1], [1]))
    x = np.random.default_rng(0).normal(size=(3, len(kernel))).astype(np.float32)
    got = np.asarray(model.model.layers[1].mlp.down_proj(jnp.asarray(x)))
    assert np.abs(x @ (kernel - exact)).max() > 1e-3
    np.testing.assert_allclose(got[[0, 2]], x[[0, 2]] @ merged, atol=1e-5)
    np.testing.assert_allclose(got[1], x[1] @ kernel, atol=1e-5)


def test_a_model_without_linear_layers_is_refused():
    class Bare(nnx.Module):
        def __init__(self):
            self.norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))

    with pytest.raises(ModelError, match="Bare has no linear layer to quantise"):
        quantize(Bare(), "int8")


def test_a_shared_layer_stays_one_layer():
    class Shared(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0))])
            self.alias = self.layers[0]

    model = Shared()
    quantize(model, "int8")
    assert model.alias is model.layers[0]
    assert dequantized(model.alias).shape == (4, 4)
