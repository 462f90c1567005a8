"""Experts spread over one mesh axis, kernels cut over another; layers in a stack."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lora_jax import (
    LoRAConfig,
    LoRAMapping,
    LRUCacheLoRAModelManager,
    shard_experts,
    shard_tensors,
)
from lora_jax.adapters import adapter_from_tensors
from lora_jax.errors import ConfigError
from lora_jax.forward import forward, split
from lora_jax.models import CausalLM, config_from_dict
from lora_jax.staging import buffer_shapes
from tiny_llama import CONFIG

RANK, TIME = 4, 5
MIXTRAL = {
    **CONFIG,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
SIZES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.v_proj": (32, 16),
    "self_attn.o_proj": (32, 32),
    "mlp.gate": (32, 4),
} | {
    f"mlp.experts.{expert}.{name}": size
    for expert in range(4)
    for name, size in {"gate_proj": (32, 24), "down_proj": (24, 32)}.items()
}
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}


def _adapter(number, sizes, prefix, rank):
    rng = np.random.default_rng(number)
    tensors = {}
    for module, (d_in, d_out) in sizes.items():
        a, b = rng.normal(0, 0.4, (rank, d_in)), rng.normal(0, 0.4, (d_out, rank))
        tensors[f"{prefix}{module}.lora_A.weight"] = a.astype("f4")
        tensors[f"{prefix}{module}.lora_B.weight"] = b.astype("f4")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    return adapter_from_tensors(tensors, config, name=f"a{number}", adapter_id=number)


def _mixture(devices, *, full=False):
    model = CausalLM(
        config_from_dict(MIXTRAL, origin="tiny"), dtype="float32", rngs=nnx.Rngs(0)
    )
    if devices:
        over = jax.make_mesh((2, 2), ("expert", "tensor"), devices=jax.devices()[:4])
        shard_experts(model, over)
        shard_tensors(model, over)
    config = LoRAConfig(max_loras=2, max_lora_rank=RANK, fully_sharded_loras=full)
    manager = LRUCacheLoRAModelManager(model, config)
    for number, rank in ((1, RANK), (2, 1)):
        prefix = "base_model.model.model.layers.0."
        manager.add_adapter(_adapter(number, SIZES, prefix, rank))
        manager.activate_adapter(number)
    return model, manager


def test_slots_of_experts_and_of_kernels_are_cut_over_an_axis_each():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (3, TIME)), jnp.int32)
    found = []
    for devices in (0, 4):
        model, manager = _mixture(devices)
        ids = [number for number in (0, 1, 2) for _ in range(TIME)]
        manager.set_adapter_mapping(LoRAMapping(ids, []))
        graphdef, weights = split(model)
        step = jax.jit(forward, static_argnums=0)
        found.append(
            [
                np.asarray(step(graphdef, weights, manager.bank, routing, tokens))
                for routing in (manager.routing, {})
            ]
        )
    (expected, _), (ours, base) = found
    np.testing.assert_allclose(ours, expected, **TOLERANCE)
    np.testing.assert_array_equal(ours[0], base[0])
    assert np.abs(ours - base)[1:].max(axis=(1, 2)).min() > 1e-2
    arrays = manager.bank.arrays
    shares = {
        name.rpartition(".")[2]: {
            key: arrays[name][key].addressable_shards[0].data.shape[1:] for key in "ab"
        }
        for name in arrays
        if "layers" in name
    }
    assert shares == {
        "qkv_proj": {"a": (3, 4, 32), "b": (4, 32)},
        "o_proj": {"a": (1, 4, 16), "b": (4, 32)},
        "gate": {"a": (1, 4, 32), "b": (4, 4)},
        "gate_up_proj": {"a": (2, 2, 4, 32), "b": (2, 4, 48)},
        "down_proj": {"a": (2, 1, 4, 24), "b": (2, 4, 32)},
    }
    buffers = buffer_shapes(manager._tiers.device.layout)
    assert {"float32", "float32, 4 experts"} < set(buffers)


def test_fully_sharded_slots_are_refused_beside_experts():
    with pytest.raises(ConfigError, match="cannot be combined, leave the option out"):
        _mixture(4, full=True)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Einsum("...F,FD->...D", (16, 8), rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.tanh(self.up(x)))


class Stacked(nnx.Module):
    """Three blocks as one module with a leading axis."""

    def __init__(self):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return Block(rngs)

        self.blocks = create(nnx.Rngs(0))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return block(x)

        return run(x, self.blocks)


CUTS = {("up", "kernel"): (None, None, "t"), ("down", "kernel"): (None, "t")}
STACKED = {
    f"blocks.{layer}.{name}": size
    for layer in (0, 2)
    for name, size in {"up": (8, 16), "down": (16, 8)}.items()
}


@pytest.mark.parametrize("full", [False, True])
def test_slots_of_a_stack_are_cut_below_its_axis_of_layers(full):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8)), jnp.float32)
    config = LoRAConfig(max_loras=2, max_lora_rank=RANK)
    outputs = []
    for devices in (0, 4):
        model = Stacked()
        if devices:
            mesh = Mesh(np.array(jax.devices()[:4]), ("t",))
            for path, variable in nnx.to_flat_state(nnx.state(model)):
                spec = PartitionSpec(*CUTS.get(path[-2:], ()))
                place = NamedSharding(mesh, spec)
                variable.set_value(jax.device_put(variable.get_value(), place))
        own = dataclasses.replace(config, fully_sharded_loras=full)
        manager = LRUCacheLoRAModelManager(model, own)
        for number, rank in ((1, RANK), (2, 2)):
            manager.add_adapter(_adapter(number, STACKED, "", rank))
            manager.activate_adapter(number)
        manager.set_adapter_mapping(LoRAMapping([0, 1, 2] * 2, []))
        outputs.append(np.asarray(model(x)))
    np.testing.assert_allclose(outputs[1], outputs[0], **TOLERANCE)
    arrays = manager.bank.arrays
    shapes = {
        (name, key): arrays[f"blocks.{name}"][key].addressable_shards[0].data.shape
        for name in ("up", "down")
        for key in "ab"
    }
    assert shapes == {
        ("up", "a"): (3, 2, 1, RANK // (4 if full else 1), 8),
        ("up", "b"): (3, 2, RANK, 4),
        ("down", "a"): (3, 2, 1, RANK, 4),
        ("down", "b"): (3, 2, RANK, 2 if full else 8),
    }
