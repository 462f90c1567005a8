"""Bytes by tier, slot and site, told before and kept flat after."""

import gc
import resource
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from helpers import Toy, make_adapter
from lora_jax.config import LoRAConfig
from lora_jax.errors import ConfigError
from lora_jax.layers import LoRALayer
from lora_jax.manager import LRUCacheLoRAModelManager, memory_needed
from lora_jax.manager.prepared import wants_pinned

CONFIG = LoRAConfig(max_loras=2, max_cpu_loras=3, max_lora_rank=8)
MIB = 2**20


def test_what_is_needed_is_what_is_then_used() -> None:
    needed = memory_needed(Toy(), CONFIG)
    manager = LRUCacheLoRAModelManager(Toy(), CONFIG)
    used = manager.memory()
    assert used.sites == needed.sites
    assert used.device == needed.device == manager.bank.nbytes
    assert used.slot * 2 == used.device
    assert used.host == 0
    assert str(used).splitlines()[0].split() == ["one", "slot", "8.6", "KiB"]


def test_asking_leaves_the_model_as_it_is() -> None:
    model = Toy()
    memory_needed(model, CONFIG)
    assert not any(isinstance(m, LoRALayer) for _, m in nnx.iter_modules(model))
    LRUCacheLoRAModelManager(model, CONFIG)
    assert memory_needed(model, LoRAConfig(max_loras=4, max_lora_rank=8)).slots == 4
    assert any(isinstance(m, LoRALayer) for _, m in nnx.iter_modules(model))


def test_a_model_of_shapes_alone_will_do() -> None:
    shapes = nnx.eval_shape(Toy)
    assert memory_needed(shapes, CONFIG).device == memory_needed(Toy(), CONFIG).device


def test_a_configuration_that_cannot_work_is_refused_beforehand() -> None:
    with pytest.raises(ConfigError, match="'absent' matches no module"):
        memory_needed(Toy(), LoRAConfig(target_modules=["absent"]))


def test_each_adapter_costs_its_own_rank_on_the_host() -> None:
    manager = LRUCacheLoRAModelManager(Toy(), CONFIG)
    for id, rank in ((1, 1), (2, 8)):
        manager.add_adapter(make_adapter(id, rank))
    bytes_of = manager.memory().adapters
    assert 6 < bytes_of[2] / bytes_of[1] < 8
    assert bytes_of[2] <= 2 * manager.memory().slot


def test_memory_is_flat_over_300_loads_and_unloads() -> None:
    manager = LRUCacheLoRAModelManager(Toy(), CONFIG)

    def visit(start: int) -> None:
        for id in range(start, start + 150):
            manager.add_adapter(make_adapter(1 + id % 7, 1 + id % 8, adapter_id=id))
            manager.activate_adapter(id)
            if id % 3 == 0:
                manager.remove_adapter(id)
        manager.remove_all_adapters()
        gc.collect()

    visit(1)
    arrays = len(jax.live_arrays())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    visit(151)
    assert len(jax.live_arrays()) == arrays
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak < 20 * MIB
    assert (manager.memory().host, manager.memory().staged) == (0, 0)


def test_host_copies_live_in_pinned_memory_where_that_is_wanted() -> None:
    config = replace(CONFIG, pin_host_memory=True)
    usual = LRUCacheLoRAModelManager(Toy(), CONFIG)
    pinned = LRUCacheLoRAModelManager(Toy(), config)
    for manager in (usual, pinned):
        manager.add_adapter(make_adapter(1, 3))
        manager.activate_adapter(1)
    copy = pinned.prepared(1).pinned
    assert usual.prepared(1).pinned is None
    assert {b.sharding.memory_kind for b in copy.values()} == {"pinned_host"}
    memory = pinned.memory()
    assert memory.host == usual.memory().host + memory.slot
    assert memory.host_at_most == usual.memory().host_at_most * 3 // 2
    for left, right in zip(
        jax.tree.leaves(usual.bank), jax.tree.leaves(pinned.bank), strict=True
    ):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(
    ("platform", "kinds", "wanted"),
    [
        ("cpu", ["device", "pinned_host"], False),
        ("gpu", ["device", "pinned_host"], True),
        ("gpu", ["device"], False),
    ],
)
def test_only_gpus_want_pinned_memory_unasked(
    platform: str, kinds: list[str], wanted: bool
) -> None:
    assert wants_pinned(platform, kinds) is wanted


def test_one_adapter_crosses_to_the_device_in_one_transfer_per_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = LRUCacheLoRAModelManager(Toy(), CONFIG)
    manager.add_adapter(make_adapter(1, 3))
    sent: list[list[int]] = []
    put = jax.device_put

    def count(tree: object, *arguments: object) -> object:
        sent.append([leaf.nbytes for leaf in jax.tree.leaves(tree)])
        return put(tree, *arguments)

    monkeypatch.setattr(jax, "device_put", count)
    manager.activate_adapter(1)
    assert [len(sizes) for sizes in sent] == [2]
    assert sum(sent[0]) == manager.memory().slot
