"""The bank is written in place while it is ours alone, and copied otherwise."""

import jax
import numpy as np
import pytest

from helpers import Toy, make_adapter
from lora_jax.config import LoRAConfig
from lora_jax.forward import split
from lora_jax.manager import LRUCacheLoRAModelManager


def _manager() -> LRUCacheLoRAModelManager:
    manager = LRUCacheLoRAModelManager(
        Toy(), LoRAConfig(max_loras=2, max_cpu_loras=4, max_lora_rank=4)
    )
    for id in (1, 2, 3, 4):
        manager.add_adapter(make_adapter(id, id))
    return manager


def _visit(manager: LRUCacheLoRAModelManager, *ids: int) -> None:
    for id in ids:
        manager.activate_adapter(id)


def test_writes_are_in_place_while_nobody_else_looks() -> None:
    manager = _manager()
    _visit(manager, 1, 2, 3, 4)
    split(manager.model)
    _visit(manager, 1, 2)
    manager.deactivate_adapter(1)
    assert manager._tiers.stats.copied_writes == 0


HOLDS = {
    "snapshot": lambda manager: manager.snapshot(),
    "bank": lambda manager: manager.bank,
    "outer dictionary": lambda manager: manager.bank.arrays,
    "one site": lambda manager: manager.bank.arrays["blocks.0.fc"],
    "one array": lambda manager: manager.bank.arrays["blocks.0.fc"]["a"],
    "the leaves": lambda manager: jax.tree.leaves(manager.bank),
}


@pytest.mark.parametrize("what", HOLDS)
def test_what_a_caller_holds_stays_as_it_was(what: str) -> None:
    manager = _manager()
    _visit(manager, 1, 2)
    held = HOLDS[what](manager)
    before = [np.array(leaf) for leaf in jax.tree.leaves(held)]
    _visit(manager, 3, 4, 1)
    assert manager._tiers.stats.copied_writes == 1
    for leaf, old in zip(jax.tree.leaves(held), before, strict=True):
        np.testing.assert_array_equal(leaf, old)
    del held
    _visit(manager, 2, 3)
    assert manager._tiers.stats.copied_writes == 1


def test_an_older_manager_of_the_same_model_does_not_reach_into_it() -> None:
    old = _manager()
    new = LRUCacheLoRAModelManager(old.model, LoRAConfig(max_loras=1, max_lora_rank=2))
    shapes = [array.shape for array in jax.tree.leaves(new.bank)]
    _visit(old, 1)
    layer = new.sites["blocks.0.fc"]
    assert layer.lora_slots.get_value()["a"].shape == (1, 1, 2, 16)
    assert [array.shape for array in jax.tree.leaves(new.bank)] == shapes
