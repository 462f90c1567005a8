"""What a running request holds stays as it was, whatever happens to the id."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from helpers import TOLERANCE, Toy, expected_rows, inputs, make_adapter
from lora_jax.adapters import Adapter
from lora_jax.config import LoRAConfig
from lora_jax.forward import forward, split
from lora_jax.manager import LoRAModelManager, LRUCacheLoRAModelManager
from lora_jax.routing import LoRAMapping, routing_from_slots

ADAPTERS = {id: make_adapter(id, 2 * id) for id in (1, 2, 3, 4)}
NEW = make_adapter(21, 3, adapter_id=1)
"""Another version of adapter 1."""


def _manager(
    *active: int,
    kind: type[LoRAModelManager] = LRUCacheLoRAModelManager,
    slots: int = 2,
) -> LoRAModelManager:
    manager = kind(Toy(), LoRAConfig(max_loras=slots, max_cpu_loras=4, max_lora_rank=8))
    for id, adapter in ADAPTERS.items():
        manager.add_adapter(adapter)
        if id in active:
            manager.activate_adapter(id)
    return manager


def _run_slots(manager: LoRAModelManager, *slots: int) -> np.ndarray:
    graphdef, weights = split(manager.model)
    routing = routing_from_slots(jnp.asarray(slots, jnp.int32), manager.lora_slots)
    out = forward(graphdef, weights, manager.bank, routing, inputs(len(slots)))
    return np.asarray(out)


def _expected(*adapters: Adapter | None) -> np.ndarray:
    return expected_rows(Toy(), adapters, inputs(len(adapters)))


def _same(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=0)


def _reload(manager: LoRAModelManager) -> None:
    manager.replace_prepared(manager.prepare(NEW))


LEAVING: dict[str, Callable[[LoRAModelManager], object]] = {
    "deactivated": lambda manager: manager.deactivate_adapter(1),
    "removed": lambda manager: manager.remove_adapter(1),
    "all removed": lambda manager: manager.remove_all_adapters(),
    "reloaded": _reload,
}


@pytest.mark.parametrize("how", LEAVING)
def test_a_held_version_goes_on_in_its_slot(how: str) -> None:
    manager = _manager(1)
    hold = manager.hold(1)
    LEAVING[how](manager)
    if how != "all removed":
        manager.activate_adapter(2)
    _same(_run_slots(manager, hold.slot, -1), _expected(ADAPTERS[1], None))
    assert hold.slot == 0
    assert manager.lora_index_to_id[0] is None


def test_after_a_reload_old_and_new_requests_get_their_own_version() -> None:
    manager = _manager(1, slots=3)
    old = manager.hold(1)
    _reload(manager)
    new = manager.hold(1)
    assert (old.slot, new.slot) == (0, 1)
    got = _run_slots(manager, old.slot, new.slot)
    _same(got[:1], _expected(ADAPTERS[1], None)[:1])
    _same(got[1:], _expected(None, NEW)[1:])
    assert manager.release(old)
    assert not manager.bank.arrays["blocks.0.fc"]["a"][0].any()
    assert manager.activate_adapter(2)
    assert manager.lora_index_to_id == [2, 1, None]
    _same(_run_slots(manager, 0, new.slot), _expected(ADAPTERS[2], NEW))


def test_n_holds_release_exactly_once_each() -> None:
    manager = _manager(1, 2)
    holds = [manager.hold(1) for _ in range(4)]
    manager.activate_adapter(3)
    assert manager.lora_index_to_id == [1, 3]
    assert [manager.release(hold) for hold in (*holds, *holds)] == [True] * 4 + [
        False
    ] * 4
    for id in (2, 4):
        manager.activate_adapter(id)
    assert manager.lora_index_to_id == [2, 4]


def test_holding_activates() -> None:
    manager = _manager()
    assert manager.hold(3).slot == 0
    assert manager.lora_index_to_id == [3, None]


@pytest.mark.parametrize("id", [9, 0])
def test_holding_an_unregistered_id_changes_nothing(id: int) -> None:
    manager = _manager(1, 2)
    with pytest.raises(KeyError, match=str(id)):
        manager.hold(id)
    assert manager.lora_index_to_id == [1, 2]


@pytest.mark.parametrize("pinned", [False, True])
def test_a_reload_keeps_id_and_pin(pinned: bool) -> None:
    manager = _manager(1, 2)
    if pinned:
        manager.pin_adapter(1)
    manager.set_adapter_mapping(LoRAMapping((1, 0), (1, 0)))
    _reload(manager)
    assert manager.lora_index_to_id == [1, 2]
    assert list(manager.list_adapters()) == [2, 3, 4, 1]
    _same(np.asarray(manager.model(inputs(2))), _expected(NEW, None))
    for id in (3, 4):
        manager.activate_adapter(id)
    assert (1 in manager.lora_index_to_id) is pinned
    assert manager.get_adapter(1) is NEW


def test_a_reload_of_an_inactive_adapter_writes_nothing() -> None:
    manager = _manager(2)
    writes = manager._tiers.stats.writes
    _reload(manager)
    assert manager._tiers.stats.writes == writes
    manager.activate_adapter(1)
    _same(
        _run_slots(manager, manager.lora_index_to_id.index(1), -1), _expected(NEW, None)
    )


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (LoRAModelManager, ValueError, "No free lora slots"),
        (LRUCacheLoRAModelManager, RuntimeError, "pinned or held by running requests"),
    ],
)
def test_a_reload_without_a_second_slot_changes_nothing(
    kind: type[LoRAModelManager], error: type[Exception], text: str
) -> None:
    manager = _manager(1, kind=kind, slots=1)
    hold = manager.hold(1)
    with pytest.raises(error, match=text):
        _reload(manager)
    assert manager.lora_index_to_id == [1]
    assert manager.list_adapters()[1] is ADAPTERS[1]
    manager.release(hold)
    _reload(manager)
    _same(_run_slots(manager, 0, -1), _expected(NEW, None))


def test_only_a_registered_id_can_be_reloaded() -> None:
    manager = _manager()
    with pytest.raises(KeyError, match="31"):
        manager.replace_prepared(manager.prepare(make_adapter(31, 1)))


@pytest.mark.parametrize(
    ("pinned", "held", "active", "id", "fits"),
    [
        ((), (), (1, 2), 3, True),
        ((1, 2), (), (1, 2), 3, False),
        ((1,), (2,), (1, 2), 3, False),
        ((1,), (2,), (1, 2), 2, True),
        ((1, 2), (), (1, 2), 9, False),
        ((), (1,), (1, 2), 9, True),
    ],
)
def test_can_load_respects_pins_and_holds(
    pinned: tuple[int, ...],
    held: tuple[int, ...],
    active: tuple[int, ...],
    id: int,
    fits: bool,
) -> None:
    manager = _manager(*active)
    for other in pinned:
        manager.pin_adapter(other)
    for other in held:
        manager.hold(other)
    assert manager.can_load(id) is fits
    assert manager.is_pinned(1) is (1 in pinned)
