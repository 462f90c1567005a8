"""Biases and DoRA, mixed with plain pairs and base rows, against changed weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers import TOLERANCE, Block, Toy, inputs, make_adapter
from lora_jax.adapters import DoRA, EmbeddingLowRank, LoRABias, LowRank, ReplacedBias
from lora_jax.bank import empty_bank, room_for, stage, write
from lora_jax.config import LoRAConfig
from lora_jax.forward import install
from lora_jax.layers import wrap
from lora_jax.packing import pack
from lora_jax.routing import routing_from_slots

FLOAT32 = np.dtype("float32")
SLOTS = 4


def _normal(seed, *shape):
    return np.random.default_rng(seed).normal(0, 0.5, shape).astype(np.float32)


def _pair(seed, d_in, d_out, rank=3):
    return LowRank(_normal(seed, rank, d_in), _normal(seed + 1, d_out, rank), 1.5)


ADAPTERS = {
    0: {"blocks.0.fc": LoRABias(_pair(1, 16, 16), _normal(3, 16))},
    1: {
        "blocks.0.fc": DoRA(_pair(5, 16, 16), 1 + np.abs(_normal(7, 16))),
        "blocks.0.k_proj": DoRA(_pair(8, 16, 4), 1 + np.abs(_normal(9, 4))),
    },
    2: {
        "blocks.0.fc": ReplacedBias(None, _normal(11, 16)),
        "blocks.1.fc": ReplacedBias(
            DoRA(_pair(12, 16, 16), 1 + np.abs(_normal(13, 16))), _normal(14, 16)
        ),
        "blocks.1.o_proj": _pair(15, 20, 16),
    },
    3: dict(make_adapter(4, 2).parts),
}
"""Slot -> parts of the adapter in it: every kind, alone and with others."""


def _adapter(slot):
    adapter = make_adapter(slot + 1, 2)
    object.__setattr__(adapter, "parts", ADAPTERS[slot])
    return adapter


def _changed(slot):
    """The toy model with the weights that the adapter's kinds are defined by."""
    model = Toy()
    for module, part in ADAPTERS.get(slot, {}).items():
        _, layer, name = module.split(".")
        block = model.blocks[int(layer)]
        fused = not hasattr(block, name)
        linear = block.qkv_proj if fused else getattr(block, name)
        columns = slice(12, 16) if name == "k_proj" else slice(None)
        if fused and name != "k_proj":
            columns = slice(0, 12) if name == "q_proj" else slice(16, 20)
        kernel = np.array(linear.kernel[...], np.float64)
        bias = None if linear.bias is None else np.array(linear.bias[...], np.float64)
        if isinstance(part, ReplacedBias):
            bias, part = part.bias.astype(np.float64), part.update
        if part is not None:
            pair = part if isinstance(part, LowRank) else part.update
            update = pair.a.astype(np.float64).T @ pair.b.astype(np.float64).T
            merged = kernel[:, columns] + pair.scale * update
            if isinstance(part, DoRA):
                merged *= part.magnitude / np.linalg.norm(merged, axis=0)
            if isinstance(part, LoRABias):
                bias = bias + pair.scale * part.bias
            kernel[:, columns] = merged
        linear.kernel.set_value(jnp.asarray(kernel, jnp.float32))
        if bias is not None:
            linear.bias.set_value(jnp.asarray(bias, jnp.float32))
    return model


def _served():
    model = Toy()
    sites = wrap(model, LoRAConfig(max_lora_rank=4))
    bank = empty_bank(sites, SLOTS, FLOAT32)
    for slot in ADAPTERS:
        packed = pack(_adapter(slot), sites, FLOAT32)
        bank = room_for(bank, sites, packed)
        bank = write(bank, slot, stage(bank, packed))
    return model, sites, bank


def test_every_kind_equals_its_changed_weights_in_one_batch():
    slots = [0, 1, 2, 3, -1, 2, 1, 0, -1]
    x = inputs(len(slots))
    model, _, bank = _served()
    install(model, bank, routing_from_slots(jnp.asarray(slots), SLOTS))
    got = np.asarray(model(x))
    alone = {slot: np.asarray(_changed(slot)(x)) for slot in {*slots}}
    for left in alone:
        for right in alone:
            gap = np.abs(alone[left] - alone[right]).max(axis=-1).min()
            assert left == right or gap > 10 * TOLERANCE
    for row, slot in enumerate(slots):
        np.testing.assert_allclose(got[row], alone[slot][row], atol=2 * TOLERANCE)
        if slot < 0:
            np.testing.assert_array_equal(got[row], alone[slot][row])


def test_room_is_made_once_for_each_kind():
    _, sites, bank = _served()
    plain = empty_bank(sites, SLOTS, FLOAT32)
    packed = pack(make_adapter(1, 2), sites, FLOAT32)
    assert room_for(plain, sites, packed) is plain
    keys = {name: set(arrays) for name, arrays in bank.arrays.items()}
    assert set(map(frozenset, keys.values())) == {
        frozenset({"a", "b", "scale", "rank", "bias", "gain"})
    }
    assert room_for(bank, sites, pack(_adapter(1), sites, FLOAT32)) is bank


def test_a_reused_slot_keeps_no_bias_and_no_gain():
    model, sites, bank = _served()
    for slot in (0, 1, 2):
        bank = write(bank, slot, stage(bank, pack(_adapter(3), sites, FLOAT32)))
    install(model, bank, routing_from_slots(jnp.asarray([0, 1, 2, 3]), SLOTS))
    x = jnp.broadcast_to(inputs(1), (4, 16))
    np.testing.assert_array_equal(model(x), jnp.broadcast_to(model(x)[3], (4, 16)))


def test_a_buffer_for_another_layout_is_refused():
    _, sites, bank = _served()
    staged = stage(empty_bank(sites, SLOTS, FLOAT32), pack(_adapter(3), sites, FLOAT32))
    with pytest.raises(ValueError, match="stage it for this bank"):
        write(bank, 0, staged)


def test_kinds_that_a_linear_layer_cannot_have_are_refused():
    layer = wrap(Toy(), LoRAConfig())["blocks.0.fc"]
    pair = EmbeddingLowRank(_normal(0, 2, 16), _normal(1, 16, 2), 1.0)
    assert layer.faults(0, pair) == [
        "a EmbeddingLowRank cannot be served by a linear layer; LowRank pairs can."
    ]
    assert layer.faults(0, ReplacedBias(None, _normal(0, 3))) == [
        "the bias has shape (3,), the layer's is (16,)."
    ]


def test_dora_needs_the_base_kernel():
    class Model(nnx.Module):
        def __init__(self):
            self.proj = nnx.Einsum("BD,SDF->SBF", (2, 16, 8), rngs=nnx.Rngs(0))

    layer = wrap(Model(), LoRAConfig())["proj"]
    assert layer.faults(0, DoRA(_pair(1, 16, 16), _normal(2, 16))) == [
        "DoRA needs the base layer's kernel, and this one shows none."
    ]


def test_bfloat16_outputs_keep_their_dtype():
    block = Block(nnx.Rngs(0), "bfloat16")
    sites = wrap(block, LoRAConfig(max_lora_rank=4))
    bank = empty_bank(sites, 1, FLOAT32)
    adapter = make_adapter(1, 2)
    parts = {"fc": LoRABias(_pair(1, 16, 16), _normal(3, 16))}
    object.__setattr__(adapter, "parts", parts)
    packed = pack(adapter, sites, FLOAT32)
    bank = room_for(bank, sites, packed)
    install(block, write(bank, 0, stage(bank, packed)), {})
    routing = routing_from_slots(jnp.zeros(2, jnp.int32), 1)
    install(block, bank, routing)
    assert (
        jax.eval_shape(block.fc, inputs(2).astype(jnp.bfloat16)).dtype == jnp.bfloat16
    )
