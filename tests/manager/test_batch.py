"""The routing of the current mapping: cached, followed, never silently stale."""

import jax
import numpy as np
import pytest
from flax import nnx

from helpers import TOLERANCE, Toy, expected_rows, inputs, make_adapter
from lora_jax.config import LoRAConfig
from lora_jax.forward import forward, split
from lora_jax.manager import LRUCacheLoRAModelManager
from lora_jax.routing import LoRAMapping

ADAPTERS = {id: make_adapter(id, 2 * id) for id in (1, 2, 3)}


def _manager(*active: int) -> LRUCacheLoRAModelManager:
    manager = LRUCacheLoRAModelManager(
        Toy(), LoRAConfig(max_loras=2, max_cpu_loras=3, max_lora_rank=8)
    )
    for id, adapter in ADAPTERS.items():
        manager.add_adapter(adapter)
        if id in active:
            manager.activate_adapter(id)
    return manager


def test_the_same_mapping_and_layout_compute_nothing() -> None:
    manager = _manager(1, 2)
    for mapping in (LoRAMapping((1, 2), (1, 2)), LoRAMapping([1, 2], [1, 2])):
        manager.set_adapter_mapping(mapping)
    assert manager._tiers.batch.computed == 1
    manager.set_adapter_mapping(LoRAMapping((2, 1), (2, 1)))
    assert manager._tiers.batch.computed == 2


def test_a_mapping_follows_its_adapters_to_other_slots() -> None:
    manager = _manager(1, 2)
    mapping = LoRAMapping((2, 0), (2, 0))
    manager.set_adapter_mapping(mapping)
    before = np.asarray(manager.model(inputs(2)))
    assert manager.lora_index_to_id == [1, 2]
    for id in (1, 2):
        manager.deactivate_adapter(id)
    manager.activate_adapter(2)
    manager.set_adapter_mapping(mapping)
    assert manager.lora_index_to_id == [2, None]
    np.testing.assert_array_equal(manager.model(inputs(2)), before)


def test_an_id_in_no_slot_is_an_error_and_the_old_mapping_stays() -> None:
    manager = _manager(1)
    manager.set_adapter_mapping(LoRAMapping((1, 0), (1, 0)))
    before = np.asarray(manager.model(inputs(2)))
    for id in (2, 9):
        with pytest.raises(KeyError, match=rf"adapters \[{id}\] of the mapping"):
            manager.set_adapter_mapping(LoRAMapping((id, 0), (id, 0)))
    np.testing.assert_array_equal(manager.model(inputs(2)), before)


def test_a_mapping_whose_adapter_has_left_stops_the_model() -> None:
    manager = _manager(1, 2)
    manager.set_adapter_mapping(LoRAMapping((1, 2), (1, 2)))
    manager.activate_adapter(3)
    assert manager.lora_index_to_id == [3, 2]
    with pytest.raises(RuntimeError, match=r"adapters \[1\] .* have left their slots"):
        manager.model(inputs(2))
    for value in (lambda: manager.routing, manager.snapshot):
        with pytest.raises(RuntimeError, match=r"adapters \[1\] .* left their slots"):
            value()
    manager.set_adapter_mapping(LoRAMapping((3, 2), (3, 2)))
    assert manager.routing.keys() == manager.snapshot().routing.keys() != set()
    expected = expected_rows(Toy(), [ADAPTERS[3], ADAPTERS[2]], inputs(2))
    np.testing.assert_allclose(
        manager.model(inputs(2)), expected, atol=TOLERANCE, rtol=0
    )


def test_a_change_elsewhere_leaves_the_mapping_at_work() -> None:
    manager = _manager(1, 2)
    manager.set_adapter_mapping(LoRAMapping((1, 0), (1, 0)))
    before = np.asarray(manager.model(inputs(2)))
    manager.activate_adapter(1)
    manager.activate_adapter(3)
    assert manager.lora_index_to_id == [1, 3]
    np.testing.assert_array_equal(manager.model(inputs(2)), before)


def test_an_all_base_batch_has_no_routing_at_all() -> None:
    manager = _manager(1, 2)
    manager.set_adapter_mapping(LoRAMapping((0, 0), (0, 0)))
    assert manager.routing == {}
    np.testing.assert_array_equal(manager.model(inputs(2)), Toy()(inputs(2)))


def test_an_all_base_batch_traces_to_the_base_models_program() -> None:
    manager = _manager(1, 2)
    manager.set_adapter_mapping(LoRAMapping((0, 0), (0, 0)))
    state = manager.snapshot()
    graphdef, weights = split(manager.model)
    base_graph, base_weights = nnx.split(Toy())

    def adapted(weights: nnx.State, x: jax.Array) -> jax.Array:
        return forward(graphdef, weights, state.bank, state.routing, x)

    def base(weights: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(base_graph, weights)(x)

    traced = [
        jax.make_jaxpr(adapted)(weights, inputs(2)),
        jax.make_jaxpr(base)(base_weights, inputs(2)),
    ]
    primitives = [[str(eqn.primitive) for eqn in t.jaxpr.eqns] for t in traced]
    assert primitives[0] == primitives[1]


def test_a_wrong_number_of_rows_names_both() -> None:
    manager = _manager(1)
    manager.set_adapter_mapping(LoRAMapping((1, 0), (1, 0)))
    with pytest.raises(ValueError, match="routing names 2 rows, but the layer sees 3"):
        manager.model(inputs(3))


def test_more_rows_than_a_domains_budget_are_refused_and_change_nothing() -> None:
    config = LoRAConfig(max_lora_rank=8, row_budgets={"tokens": 3, "prompts": 2})
    manager = LRUCacheLoRAModelManager(Toy(), config)
    manager.add_adapter(ADAPTERS[1])
    manager.activate_adapter(1)
    manager.set_adapter_mapping(LoRAMapping((1, 0, 1), (1, 0)))
    before = manager.routing
    with pytest.raises(ValueError, match="4 rows for tokens, row_budgets allows 3"):
        manager.set_adapter_mapping(LoRAMapping((1, 0, 1, 1), (1,)))
    with pytest.raises(ValueError, match="3 rows for prompts, row_budgets allows 2"):
        manager.set_adapter_mapping(LoRAMapping((1, 0), (1, 1, 0)))
    assert manager.routing == before
