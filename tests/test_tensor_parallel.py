"""Many adapters on a decoder whose kernels are cut over devices: as on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax import LoRAConfig, LoRAMapping, LRUCacheLoRAModelManager, shard_tensors
from lora_jax import bank as bank_module
from lora_jax.adapters import DoRA, EmbeddingLowRank, LoRABias, LowRank
from lora_jax.bank import clear, stage
from lora_jax.errors import ConfigError
from lora_jax.forward import forward, split
from lora_jax.manager import memory_needed
from lora_jax.staging import buffer_shapes
from tiny_llama import SIZES, tiny_adapter, tiny_model

VOCAB, RANK, TIME = 64, 8, 6
CHANGES = {"vocab_size": VOCAB, "num_hidden_layers": 1}
TOLERANCE = {"atol": 3e-4, "rtol": 1e-4}
"""Of logits of order 30."""
LAYERS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
GATHERS = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def model_on(devices):
    model = tiny_model(**CHANGES)
    if devices:
        found = jax.devices()[:devices]
        shard_tensors(model, jax.make_mesh((devices,), ("tensor",), devices=found))
    return model


def numbered(number, rank, targets=tuple(SIZES), *, change=None):
    adapter = tiny_adapter(f"a{number}", number, rank, targets)
    parts = {
        name: (change or _same)(name, part)
        for name, part in adapter.parts.items()
        if "layers.0" in name
    }
    return dataclasses.replace(adapter, id=number, parts=parts)


def _same(name, part):
    return part


def _dora(name, part):
    rng = np.random.default_rng(len(name))
    return DoRA(part, 1 + rng.random(part.b.shape[0]).astype("f4"))


def _biased(name, part):
    rng = np.random.default_rng(len(name))
    return LoRABias(part, rng.normal(size=part.b.shape[0]).astype("f4"))


def _with_vocabulary(adapter):
    """Also adapts the embedding and the head that is tied to it."""
    rng = np.random.default_rng(5)
    values = [rng.normal(0, 0.3, s).astype("f4") for s in ((2, VOCAB), (32, 2))]
    extra = {
        "model.embed_tokens": EmbeddingLowRank(*values, 1.0),
        "lm_head": LowRank(values[1].T, values[0].T, 1.0),
    }
    return dataclasses.replace(adapter, parts=dict(adapter.parts) | extra)


ADAPTERS = (
    numbered(1, RANK),
    numbered(2, 3, ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")),
    numbered(3, 4, change=_dora),
    numbered(4, 2, ("self_attn.q_proj", "self_attn.o_proj"), change=_biased),
    _with_vocabulary(numbered(5, 1)),
)
IDS = [number for number in range(len(ADAPTERS) + 1) for _ in range(TIME)]


def tokens():
    rng = np.random.default_rng(1)
    shape = (len(ADAPTERS) + 1, TIME)
    return jnp.asarray(rng.integers(0, VOCAB, shape), jnp.int32)


def serve(devices, *, full=False, slots=5, adapters=ADAPTERS):
    config = LoRAConfig(
        max_loras=slots,
        max_cpu_loras=len(ADAPTERS),
        max_lora_rank=RANK,
        fully_sharded_loras=full,
    )
    manager = LRUCacheLoRAModelManager(model_on(devices), config)
    for adapter in adapters:
        manager.add_adapter(adapter)
    return manager


def mixed(manager):
    """Logits of a batch of every kind of adapter, and of the base model."""
    for adapter in ADAPTERS:
        manager.activate_adapter(adapter.id)
    manager.set_adapter_mapping(LoRAMapping(IDS, []))
    graphdef, weights = split(manager.model)
    step = jax.jit(forward, static_argnums=0)
    return [
        np.asarray(step(graphdef, weights, manager.bank, routing, tokens()))
        for routing in (manager.routing, {})
    ]


@pytest.fixture(scope="module")
def alone():
    """The batch of all adapters on one device, and its bank."""
    manager = serve(0)
    return mixed(manager)[0], manager.bank


@pytest.mark.parametrize(
    ("devices", "full"), [(2, False), (4, False), (2, True), (4, True)]
)
def test_every_kind_of_adapter_in_one_batch(devices, full, alone):
    expected, bank = alone
    manager = serve(devices, full=full)
    found, base = mixed(manager)
    np.testing.assert_allclose(found, expected, **TOLERANCE)
    np.testing.assert_array_equal(found[0], base[0])
    assert np.abs(found - base)[1:].max(axis=(1, 2)).min() > 0.1
    for name, arrays in bank.arrays.items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(manager.bank.arrays[name][key], array)


SHARES = {
    "self_attn.qkv_proj": ((3, 8, 32), (8, 16)),
    "self_attn.o_proj": ((1, 8, 8), (8, 32)),
    "mlp.gate_up_proj": ((2, 8, 32), (8, 24)),
    "mlp.down_proj": ((1, 8, 12), (8, 32)),
}
FULL_SHARES = {
    "self_attn.qkv_proj": ((3, 2, 32), (8, 16)),
    "self_attn.o_proj": ((1, 8, 8), (8, 8)),
    "mlp.gate_up_proj": ((2, 2, 32), (8, 24)),
    "mlp.down_proj": ((1, 8, 12), (8, 8)),
}
"""Site -> shapes of A and B of one slot on each of four devices."""


@pytest.mark.parametrize(("full", "shares"), [(False, SHARES), (True, FULL_SHARES)])
def test_each_device_holds_its_share_of_a_slot(full, shares):
    manager = serve(4, full=full)
    mixed(manager)
    for name in LAYERS:
        arrays = manager.bank.arrays[f"model.layers.0.{name}"]
        for key, shape in zip("ab", shares[name], strict=True):
            found = {shard.data.shape[1:] for shard in arrays[key].addressable_shards}
            assert found == {shape}
        wide = arrays["bias"].shape[1]
        own = wide // 4 if name in ("self_attn.qkv_proj", "mlp.gate_up_proj") else wide
        for key in ("bias", "gain"):
            found = {shard.data.shape[1:] for shard in arrays[key].addressable_shards}
            assert found == {(own,)}
    for name in ("model.embed_tokens", "lm_head"):
        arrays = manager.bank.arrays[name].values()
        assert all(array.sharding.is_fully_replicated for array in arrays)
        assert all(len(array.sharding.device_set) == 4 for array in arrays)
    leaves = jax.tree.leaves(manager.bank)
    each = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    memory = manager.memory()
    assert memory.each_device == each < memory.device


def test_the_memory_is_known_before():
    config = LoRAConfig(max_loras=2, max_lora_rank=RANK)
    leaves = jax.tree.leaves(LRUCacheLoRAModelManager(model_on(4), config).bank)
    each = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert memory_needed(model_on(4), config).each_device == each
    full = dataclasses.replace(config, fully_sharded_loras=True)
    assert memory_needed(model_on(4), full).each_device < each


def test_swaps_leave_what_they_leave_on_one_device():
    managers = [serve(0, slots=2), serve(2, slots=2), serve(4, slots=2, full=True)]
    for number in (1, 2, 3, 4, 5, 1):
        for manager in managers:
            manager.activate_adapter(number)
        _assert_same_banks(managers)
    for manager in managers:
        manager.deactivate_adapter(5)
    _assert_same_banks(managers)
    slot = managers[1].lora_index_to_id.index(1)
    for manager in managers[1:]:
        emptied = clear(manager.bank, slot)
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(emptied))


def _assert_same_banks(managers):
    single, *others = (jax.tree.leaves(manager.bank) for manager in managers)
    for leaves in others:
        for left, right in zip(single, leaves, strict=True):
            np.testing.assert_array_equal(left, right)


PLAIN = (
    numbered(1, RANK),
    numbered(2, 3, ("self_attn.k_proj", "mlp.down_proj")),
    numbered(3, 1),
    numbered(4, 5, ("self_attn.o_proj",)),
)


@pytest.mark.parametrize("full", [False, True])
def test_no_other_adapter_compiles_again(full):
    manager = serve(2, full=full, slots=2, adapters=PLAIN)
    graphdef, weights = split(manager.model)
    step = jax.jit(
        lambda weights, bank, routing, x: forward(graphdef, weights, bank, routing, x)
    )
    writes = []
    for adapter in (*PLAIN, PLAIN[0]):
        manager.activate_adapter(adapter.id)
        ids = [adapter.id * (row % 2) for row in range(len(IDS))]
        manager.set_adapter_mapping(LoRAMapping(ids, []))
        step(weights, manager.bank, manager.routing, tokens())
        writes.append(bank_module._write_donated._cache_size())
    assert step._cache_size() == 1
    assert len(set(writes)) == 1
    assert manager.stats.copied_writes == 0


@pytest.mark.parametrize("full", [False, True])
def test_a_write_in_place_copies_no_slot_array_and_asks_no_other_device(full):
    manager = serve(4, full=full, adapters=PLAIN)
    bank, place = manager.bank, manager._tiers.device.place
    shapes = buffer_shapes(manager._tiers.device.layout)
    assert set(shapes) == {"float32", "int32"}
    staged = place.put(stage(bank, manager.prepared(1).packed))
    assert all(buffer.sharding.is_fully_replicated for buffer in staged.values())
    compiled = bank_module._write_donated.lower(bank, jnp.int32(0), staged).compile()
    text = compiled.as_text()
    for word in GATHERS:
        assert word not in text
    arrays = jax.tree.leaves(bank)
    locals_ = {array.addressable_shards[0].data.shape for array in arrays}
    own = {f"[{','.join(map(str, shape))}]" for shape in locals_}
    copies = [line.split("=")[1][:40] for line in text.splitlines() if " copy(" in line]
    assert not [line for line in copies if any(shape in line for shape in own)]
    assert text.count("may-alias") >= len(arrays)


@pytest.mark.parametrize("rows", [6, 40])
@pytest.mark.parametrize("full", [False, True])
def test_a_step_gathers_no_slot_array(full, rows):
    """Activations alone cross between devices, few rows or many."""
    manager = serve(4, full=full, adapters=PLAIN, slots=3)
    manager.activate_adapter(1)
    manager.set_adapter_mapping(LoRAMapping([1] * (3 * rows), []))
    graphdef, weights = split(manager.model)
    step = jax.jit(forward, static_argnums=0)
    batch = jnp.zeros((3, rows), jnp.int32)
    text = step.lower(graphdef, weights, manager.bank, manager.routing, batch)
    lines = text.compile().as_text().splitlines()
    moved = [line for line in lines if any(f" {word}(" in line for word in GATHERS)]
    assert moved
    wholes = {leaf.shape for leaf in jax.tree.leaves(manager.bank)}
    for shape in (shape for shape in wholes if len(shape) > 2):
        for text in (shape, shape[1:]):
            written = f"f32[{','.join(map(str, text))}]"
            assert not [line[:200] for line in moved if written in line]


def test_copies_on_the_host_and_sent_ahead_are_written_too():
    managers = []
    for pins in (False, True):
        config = LoRAConfig(max_loras=1, max_lora_rank=RANK, pin_host_memory=pins)
        manager = LRUCacheLoRAModelManager(model_on(2), config)
        manager.add_prepared(manager.send(manager.prepare(ADAPTERS[0])))
        for _ in range(2):
            manager.activate_adapter(1)
            manager.deactivate_adapter(1)
        manager.activate_adapter(1)
        managers.append(manager)
    _assert_same_banks(managers)
    kinds = {b.sharding.memory_kind for b in managers[1].prepared(1).pinned.values()}
    assert kinds == {"pinned_host"}


@pytest.mark.parametrize(
    ("full", "default", "rank"),
    [(False, 3, 3), (True, 3, 4), (True, 8, 8), (True, 9, 8)],
)
def test_dummies_have_a_rank_that_the_devices_divide(full, default, rank):
    manager = serve(4, full=full, adapters=())
    assert manager.get_dummy_lora_warmup_rank(default) == rank


def test_the_rank_must_divide_over_the_devices():
    config = LoRAConfig(max_lora_rank=6, fully_sharded_loras=True)
    with pytest.raises(ConfigError, match=r"_proj: .* multiple of 4, got 6"):
        LRUCacheLoRAModelManager(model_on(4), config)
