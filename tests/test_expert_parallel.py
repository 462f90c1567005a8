"""Many adapters on experts that are spread over devices: as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from expert_files import EXPERTS, Sizes
from expert_models import build, make, serve
from lora_jax import LoRAConfig, LoRAMapping, LRUCacheLoRAModelManager, shard_experts
from lora_jax import bank as bank_module
from lora_jax.bank import clear, stage
from lora_jax.errors import ConfigError
from lora_jax.forward import forward, merge, split
from lora_jax.layers import experts as layer_module
from lora_jax.manager import memory_needed
from lora_jax.packing import pack
from lora_jax.staging import buffer_shapes

SIZES = Sizes(8, 12, 10)
TOKENS, TOP_K, RANK = 24, 2, 3
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}
LAYOUTS = (
    "pairs",
    "some_experts",
    "own_ranks",
    "fused",
    "doubled_rank",
    "shared_outer",
    "lists_of_experts",
    "router",
    "router_and_experts",
)
SITES = (f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj")


def model_on(devices, sizes=SIZES):
    model = build(sizes, TOP_K)
    if devices:
        found = jax.devices()[:devices]
        shard_experts(model, jax.make_mesh((devices,), ("expert",), devices=found))
    return model


def adapters(*names):
    return [
        make(name, SIZES, RANK, seed=i, adapter_id=i)[0]
        for i, name in enumerate(names, start=1)
    ]


def tokens():
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.standard_normal((TOKENS, SIZES.d)), jnp.float32)


IDS = [row % (len(LAYOUTS) + 1) for row in range(TOKENS)]


@pytest.fixture(scope="module")
def alone():
    """The batch of all layouts on one device, and its bank."""
    model = model_on(0)
    manager = serve(model, adapters(*LAYOUTS))
    manager.set_adapter_mapping(LoRAMapping(IDS, []))
    return np.asarray(model(tokens())), manager.bank


@pytest.mark.parametrize("devices", [2, 4])
def test_every_layout_in_one_batch(devices, alone):
    expected, bank = alone
    model = model_on(devices)
    plain = np.asarray(model(tokens()))
    manager = serve(model, adapters(*LAYOUTS))
    manager.set_adapter_mapping(LoRAMapping(IDS, []))
    found = np.asarray(model(tokens()))
    np.testing.assert_allclose(found, expected, **TOLERANCE)
    base = np.array(IDS) == 0
    np.testing.assert_array_equal(found[base], plain[base])
    assert (np.abs(found - plain)[~base].max(axis=1) > 1e-3).sum() > 15
    for name, arrays in bank.arrays.items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(manager.bank.arrays[name][key], array)


def test_tokens_of_one_device_alone_and_gradients_of_the_slots():
    """Every token chooses experts 0 and 1: three of four devices have no pair."""
    found = []
    chosen = jnp.asarray([[0, 1]] * TOKENS, jnp.int32)
    weights = jnp.full((TOKENS, TOP_K), 0.5)
    for devices in (0, 4):
        model = model_on(devices)
        manager = serve(model, adapters("pairs", "fused"))
        manager.set_adapter_mapping(LoRAMapping([row % 3 for row in range(TOKENS)], []))
        graphdef, state = split(model)

        def loss(bank, model=model, graphdef=graphdef, state=state, manager=manager):
            merged = merge(graphdef, state, bank, manager.routing)
            out = merged.block.experts(tokens(), chosen, weights)
            return jnp.sum(jnp.sin(out)), out

        grad = jax.jit(jax.grad(loss, has_aux=True, allow_int=True))
        found.append(grad(manager.bank))
    (grads, out), (grads_spread, out_spread) = found
    np.testing.assert_allclose(out_spread, out, **TOLERANCE)
    for name in SITES:
        for key in ("a", "b", "scale"):
            expected = np.asarray(grads.arrays[name][key])
            ours = np.asarray(grads_spread.arrays[name][key])
            assert np.abs(expected).max() > 1e-3
            np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-3)
            assert not ours[:, 2:].any()


def test_each_device_holds_and_receives_its_own_experts_only():
    manager = serve(model_on(4), adapters("fused"))
    for name, arrays in manager.bank.arrays.items():
        for array in arrays.values():
            shapes = {shard.data.shape for shard in array.addressable_shards}
            local = (*array.shape[:1], 2, *array.shape[2:])
            assert shapes == ({local} if name in SITES else {array.shape})
            assert len(array.sharding.device_set) == 4
    prepared = manager.send(manager.prepared(1))
    shapes = buffer_shapes(manager._tiers.device.layout)
    assert set(shapes) == {
        "float32",
        "int32",
        "float32, 8 experts",
        "int32, 8 experts",
    }
    for name, buffer in prepared.ahead.items():
        assert buffer.shape == shapes[name]
        parts = {shard.data.shape for shard in buffer.addressable_shards}
        assert parts == {(2, *buffer.shape[1:]) if buffer.ndim > 1 else buffer.shape}
    ahead = np.asarray(prepared.ahead["float32, 8 experts"])
    assert ahead.any(axis=1).all()


def test_swaps_leave_what_they_leave_on_one_device():
    names = ("pairs", "fused", "router", "some_experts", "own_ranks")
    config = LoRAConfig(max_loras=2, max_cpu_loras=len(names), max_lora_rank=8)
    managers = [LRUCacheLoRAModelManager(model_on(n), config) for n in (0, 2)]
    for manager in managers:
        for adapter in adapters(*names):
            manager.add_adapter(adapter)
    for id_ in (1, 2, 3, 4, 5, 1):
        for manager in managers:
            manager.activate_adapter(id_)
        _assert_same_banks(*managers)
    for manager in managers:
        manager.deactivate_adapter(5)
        assert manager.stats.copied_writes == 0
    _assert_same_banks(*managers)
    emptied = clear(managers[1].bank, managers[1].lora_index_to_id.index(1))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(emptied))


def _assert_same_banks(single, spread):
    for left, right in zip(
        jax.tree.leaves(single.bank), jax.tree.leaves(spread.bank), strict=True
    ):
        np.testing.assert_array_equal(left, right)


def test_no_other_adapter_compiles_again():
    names = ("pairs", "fused", "router", "some_experts", "own_ranks")
    model = model_on(2)
    config = LoRAConfig(max_loras=2, max_cpu_loras=len(names), max_lora_rank=8)
    manager = LRUCacheLoRAModelManager(model, config)
    graphdef, weights = split(model)
    step = jax.jit(
        lambda weights, bank, routing, x: forward(graphdef, weights, bank, routing, x)
    )
    writes = []
    for adapter in adapters(*names):
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)
        ids = [adapter.id * (row % 2) for row in range(TOKENS)]
        manager.set_adapter_mapping(LoRAMapping(ids, []))
        step(weights, manager.bank, manager.routing, tokens() * adapter.id)
        writes.append(bank_module._write_donated._cache_size())
    assert step._cache_size() == 1
    assert len(set(writes)) == 1


def test_a_write_in_place_copies_no_slot_array_and_asks_no_other_device():
    manager = serve(model_on(4), adapters("pairs", "fused", "router"))
    bank = manager.bank
    staged = manager._tiers.device.place.put(stage(bank, manager.prepared(1).packed))
    compiled = bank_module._write_donated.lower(bank, jnp.int32(0), staged).compile()
    text = compiled.as_text()
    for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert word not in text
    arrays = jax.tree.leaves(bank)
    locals_ = {array.addressable_shards[0].data.shape for array in arrays}
    shapes = {f"[{','.join(map(str, shape))}]" for shape in locals_}
    copies = [line.split("=")[1][:40] for line in text.splitlines() if " copy(" in line]
    assert not [line for line in copies if any(shape in line for shape in shapes)]
    assert text.count("may-alias") >= len(arrays)


def test_copies_on_the_host_and_sent_ahead_are_written_too():
    config = LoRAConfig(max_loras=1, max_cpu_loras=3, max_lora_rank=8)
    pinned = LoRAConfig(
        max_loras=1, max_cpu_loras=3, max_lora_rank=8, pin_host_memory=True
    )
    plain, pins = (
        LRUCacheLoRAModelManager(model_on(2), one) for one in (config, pinned)
    )
    (adapter,) = adapters("fused")
    for manager in (plain, pins):
        manager.add_prepared(manager.send(manager.prepare(adapter)))
        manager.activate_adapter(1)
        manager.deactivate_adapter(1)
        manager.activate_adapter(1)
    kinds = {b.sharding.memory_kind for b in pins.prepared(1).pinned.values()}
    assert kinds == {"pinned_host"}
    _assert_same_banks(plain, pins)
    assert np.asarray(pins.bank.arrays[SITES[0]]["a"]).any()


def test_the_report_tells_the_bytes_of_each_device():
    manager = serve(model_on(4), adapters("pairs"))
    memory = manager.memory()
    leaves = jax.tree.leaves(manager.bank)
    assert memory.device == sum(leaf.nbytes for leaf in leaves)
    each = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert memory.each_device == each < memory.device
    needed = memory_needed(model_on(4), LoRAConfig(max_loras=1))
    assert needed.each_device == each
    assert "of that on each device" in str(memory)
    assert "on each device" not in str(serve(model_on(0), adapters("pairs")).memory())


@pytest.mark.parametrize("layout", ["pairs", "fused", "shared_outer"])
def test_host_copies_hold_the_experts_of_the_process(layout, monkeypatch):
    (adapter,) = adapters(layout)
    manager = LRUCacheLoRAModelManager(model_on(2), LoRAConfig(max_loras=1))
    dtype = np.dtype("float32")
    whole = pack(adapter, manager.sites, dtype)
    monkeypatch.setattr(layer_module, "process_experts", lambda *_: range(4, 8))
    packed = pack(adapter, manager.sites, dtype)
    for name in SITES:
        for key, array in packed.sites[name].items():
            assert not array[:4].any()
            np.testing.assert_array_equal(array[4:], whole.sites[name][key][4:])


def test_the_option_insists_on_experts_that_are_spread():
    config = LoRAConfig(enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="call shard_experts"):
        LRUCacheLoRAModelManager(model_on(0), config)
    assert len(LRUCacheLoRAModelManager(model_on(2), config).sites) == 3


def test_fully_sharded_slots_are_refused_whoever_says_it():
    config = LoRAConfig(fully_sharded_loras=True)
    with pytest.raises(ConfigError, match="cannot be combined, leave the option out"):
        LRUCacheLoRAModelManager(model_on(2), config)
