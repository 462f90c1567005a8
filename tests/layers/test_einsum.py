"""Layers with head axes, and layers of other people, against merged weights."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax.adapters import adapter_from_tensors
from lora_jax.bank import empty_bank, stage, write
from lora_jax.config import LoRAConfig
from lora_jax.errors import ConfigError, ModelError
from lora_jax.forward import install
from lora_jax.layers import wrap
from lora_jax.layers.einsum import describe_einsum, describe_general
from lora_jax.packing import pack
from lora_jax.routing import routing_from_slots

FLOAT32 = np.dtype("float32")
SHAPE = (2, 3)
"""Batch and time of the inputs: six rows."""


class OtherPeoplesLinear(nnx.Module):
    """A layer that is no `nnx.Linear` but keeps a 2-D `kernel`."""

    def __init__(self, d_in, d_out, rngs):
        self.kernel = nnx.Param(rngs.params.normal((d_in, d_out)))

    def __call__(self, x):
        return x @ self.kernel[...]


RNGS = nnx.Rngs(0)
LAYERS = {
    "heads out": (nnx.Einsum("BTD,DNH->BTNH", (6, 2, 4), rngs=RNGS), (6,)),
    "heads in": (nnx.Einsum("BTNH,NHD->BTD", (2, 4, 6), rngs=RNGS), (2, 4)),
    "square": (nnx.Einsum("BTD,DF->BTF", (6, 6), rngs=RNGS), (6,)),
    "stacked qkv": (nnx.Einsum("BTD,SNDH->SBTNH", (3, 2, 6, 4), rngs=RNGS), (6,)),
    "with a bias": (nnx.Einsum("...D,DNH->...NH", (6, 2, 4), (2, 4), rngs=RNGS), (6,)),
    "general out": (nnx.LinearGeneral(6, (2, 4), rngs=RNGS), (6,)),
    "general in": (nnx.LinearGeneral((2, 4), 6, axis=(-2, -1), rngs=RNGS), (2, 4)),
    "known by its kernel": (OtherPeoplesLinear(6, 5, RNGS), (6,)),
}


class Model(nnx.Module):
    def __init__(self, layer):
        self.proj = layer

    def __call__(self, x):
        return self.proj(x)


def _pair(layer, name, rank, seed):
    shape = describe_of(layer, name)
    rng = np.random.default_rng(seed)
    return {
        "proj.lora_A.weight": rng.normal(size=(rank, shape.d_in)).astype("f4"),
        "proj.lora_B.weight": rng.normal(size=(shape.parts[0][1], rank)).astype("f4"),
    }


def describe_of(layer, name):
    sites = wrap(Model(nnx.clone(layer)), LoRAConfig())
    return sites[name].lora_site.shape


@pytest.mark.parametrize("case", LAYERS)
def test_rows_equal_the_merged_kernel(case):
    layer, feature_shape = LAYERS[case]
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(*SHAPE, *feature_shape)).astype("f4"))
    tensors = [_pair(layer, "proj", rank, seed) for rank, seed in ((3, 1), (2, 2))]
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["proj"]}
    adapters = [
        adapter_from_tensors(
            pair, config | {"r": rank, "lora_alpha": 2 * rank}, name="p"
        )
        for pair, rank in zip(tensors, (3, 2), strict=True)
    ]
    model = Model(nnx.clone(layer))
    sites = wrap(model, LoRAConfig(max_lora_rank=4))
    bank = empty_bank(sites, 2, FLOAT32)
    for slot, adapter in enumerate(adapters):
        bank = write(bank, slot, stage(bank, pack(adapter, sites, FLOAT32)))
    slots = np.array([0, -1, 1, 1, 0, -1], np.int32)
    install(model, bank, routing_from_slots(jnp.asarray(slots), 2))
    got = _by_row(model(x), case)
    outputs = [_by_row(_merged(layer, pair)(x), case) for pair in (*tensors, None)]
    assert np.abs(outputs[0] - outputs[2]).max(axis=-1).min() > 1e-3
    assert np.abs(outputs[0] - outputs[1]).max(axis=-1).min() > 1e-3
    for row, slot in enumerate(slots):
        np.testing.assert_allclose(got[row], outputs[slot][row], atol=2e-5, rtol=1e-5)


def _by_row(outputs, case):
    """Six rows, whatever the layout of the layer's outputs."""
    outputs = np.asarray(outputs)
    if case == "stacked qkv":
        outputs = np.moveaxis(outputs, 0, 2)
    return outputs.reshape(6, -1)


def _merged(layer, pair):
    """The layer with its kernel changed, axis by axis, independent of `Shape`."""
    copy = nnx.clone(layer)
    if pair is None:
        return copy
    update = 2.0 * (pair["proj.lora_B.weight"] @ pair["proj.lora_A.weight"]).T
    kernel = np.asarray(layer.kernel[...])
    if kernel.shape == (3, 2, 6, 4):
        update = update.reshape(6, 3, 2, 4).transpose(1, 2, 0, 3)
    copy.kernel.set_value(jnp.asarray(kernel + update.reshape(kernel.shape)))
    return copy


@pytest.mark.parametrize(
    "equation",
    ["BTD,BDF->BTF", "BTD,DF->TBF"],
)
def test_an_einsum_that_is_no_linear_layer_over_rows_is_refused(equation):
    layer = nnx.Einsum(
        equation, (6,) * len(equation.split(",")[1].split("->")[0]), rngs=RNGS
    )
    with pytest.raises(ModelError, match="is no linear layer over rows"):
        describe_einsum(layer, "proj")


def test_a_layer_that_cannot_carry_lora_is_left_alone_unless_it_is_a_target():
    layer = nnx.Einsum("BTD,BDF->BTF", (6, 6, 6), rngs=RNGS)
    model = Model(layer)
    model.other = nnx.Linear(2, 2, rngs=RNGS)
    assert set(wrap(model, LoRAConfig())) == {"other"}
    with pytest.raises(ConfigError, match="is no linear layer over rows"):
        wrap(model, LoRAConfig(target_modules=["proj"]))


def test_a_general_layer_over_other_axes_is_refused():
    layer = nnx.LinearGeneral(6, 4, axis=0, rngs=RNGS)
    with pytest.raises(ModelError, match=r"axis=\(0,\) cannot carry LoRA"):
        describe_general(layer, "proj")


def test_multi_head_attention_of_flax_is_wrapped_inside():
    model = Model(nnx.MultiHeadAttention(2, 6, 8, decode=False, rngs=nnx.Rngs(1)))
    sites = wrap(model, LoRAConfig())
    assert {name: layer.lora_site.shape.parts for name, layer in sites.items()} == {
        f"proj.{name}": ((name, 8 if name != "out" else 6),)
        for name in ("query", "key", "value", "out")
    }
