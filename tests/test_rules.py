"""`FixedRules` and `LRURules`: recorded traces, and what holds add to them."""

from collections.abc import Callable

import pytest

from lora_jax.rules import FixedRules, LRURules, Rules
from lora_jax.slots import SlotTable
from manager_traces import FIXED, LRU, Step, read_steps


def _add(rules: Rules, table: SlotTable, id: int) -> bool:
    if id in table.registered:
        rules.added_again(table, id)
        return False
    table.register(rules.plan_registration(table, id))
    return True


def _activate(rules: Rules, table: SlotTable, id: int) -> bool:
    if id in table.active:
        rules.activated_again(table, id)
        return False
    table.activate(rules.plan_activation(table, id))
    return True


def _pin(rules: Rules, table: SlotTable, id: int) -> bool:
    rules.check_pin(table, id)
    if id not in table.active:
        _activate(rules, table, id)
    table.registered.pin(id)
    table.active.pin(id)
    return True


def _get(rules: Rules, table: SlotTable, id: int) -> bool:
    table.registered.touch(id)
    return True


def _remove_oldest(rules: Rules, table: SlotTable, id: int) -> bool:
    assert isinstance(rules, LRURules)
    return table.unregister(rules.plan_eviction(table))


DO: dict[str, Callable[[Rules, SlotTable, int], bool]] = {
    "add": _add,
    "act": _activate,
    "deact": lambda rules, table, id: table.deactivate(id),
    "rem": lambda rules, table, id: table.unregister(id),
    "pin": _pin,
    "get": _get,
    "old": _remove_oldest,
}


def _seen(step: Step, table: SlotTable, result: bool | str) -> Step:
    return Step(
        step.operation,
        step.id,
        result,
        table.index_to_id,
        list(table.registered),
        list(table.active),
        (sorted(table.registered.pinned), sorted(table.active.pinned)),
    )


@pytest.mark.parametrize(
    ("rules", "trace"), [(FixedRules(), FIXED), (LRURules(), LRU)], ids=["fixed", "lru"]
)
def test_recorded_traces_come_out_exactly(rules: Rules, trace: str) -> None:
    table = SlotTable(2, 3)
    for step in read_steps(trace):
        try:
            result: bool | str = DO[step.operation](rules, table, step.id)
        except (KeyError, RuntimeError, ValueError) as error:
            result = type(error).__name__
        assert _seen(step, table, result) == step


def _table(slots: int, capacity: int, *, active: int, registered: int) -> SlotTable:
    table, rules = SlotTable(slots, capacity), LRURules()
    for id in range(1, registered + 1):
        _add(rules, table, id)
    for id in range(1, active + 1):
        _activate(rules, table, id)
    return table


def test_a_held_adapter_is_never_evicted() -> None:
    table, rules = _table(2, 3, active=2, registered=3), LRURules()
    table.hold(1)
    assert rules.plan_activation(table, 3).evicts == 2
    assert rules.plan_registration(table, 4).evicts == 3


def test_nobody_left_to_evict_says_why() -> None:
    table, rules = _table(2, 2, active=2, registered=2), LRURules()
    table.active.pin(1)
    table.registered.pin(1)
    table.hold(2)
    with pytest.raises(RuntimeError, match="All items are pinned or held by running"):
        rules.plan_activation(table, 2)
    with pytest.raises(RuntimeError, match="All items are pinned or held by running"):
        rules.plan_registration(table, 3)


def test_a_retired_slot_is_used_again_after_its_last_release() -> None:
    table, rules = _table(1, 2, active=1, registered=2), LRURules()
    claims = [table.hold(1), table.hold(1)]
    table.unregister(1)
    assert table.index_to_id == [None]
    assert not rules.can_activate(table, [2])
    with pytest.raises(RuntimeError, match="held by running requests"):
        rules.plan_activation(table, 2)
    assert [table.release(claim) for claim in (*claims, claims[0])] == [
        True,
        True,
        False,
    ]
    assert rules.plan_activation(table, 2).slot == 0


@pytest.mark.parametrize(
    ("pinned", "held", "ids", "fits"),
    [
        ((), (), (1, 2, 3), True),
        ((), (), (1, 2, 3, 4), False),
        ((1,), (), (2, 3), True),
        ((1,), (), (2, 3, 4), False),
        ((1,), (), (1, 3, 4), True),
        ((1,), (2,), (3, 4), False),
        ((1,), (2,), (1, 2, 4), True),
        ((), (), (1, 9), False),
        ((1, 2, 3), (), (), True),
    ],
)
def test_can_activate_counts_pins_and_holds(
    pinned: tuple[int, ...], held: tuple[int, ...], ids: tuple[int, ...], fits: bool
) -> None:
    table, rules = _table(3, 5, active=3, registered=5), LRURules()
    for id in pinned:
        _pin(rules, table, id)
    for id in held:
        table.hold(id)
    assert rules.can_activate(table, ids) is fits
    if fits:
        for id in ids:
            _activate(rules, table, id)
        assert set(ids) <= set(table.active)


def test_without_eviction_only_free_slots_count() -> None:
    table, rules = _table(3, 5, active=2, registered=5), FixedRules()
    assert rules.can_activate(table, [1, 3])
    assert not rules.can_activate(table, [3, 4])


@pytest.mark.parametrize(
    ("rules", "full", "error", "text"),
    [
        (FixedRules(), True, ValueError, "No free lora slots"),
        (FixedRules(), False, KeyError, "9"),
        (LRURules(), True, KeyError, "9"),
        (LRURules(), False, KeyError, "9"),
    ],
)
def test_activating_an_unregistered_id_changes_nothing(
    rules: Rules, full: bool, error: type[Exception], text: str
) -> None:
    table = _table(2, 3, active=2 if full else 1, registered=2)
    before = (table.layout(), list(table.registered), list(table.active))
    with pytest.raises(error, match=text):
        _activate(rules, table, 9)
    assert (table.layout(), list(table.registered), list(table.active)) == before


def test_only_the_lru_manager_pins() -> None:
    table = _table(1, 1, active=0, registered=0)
    with pytest.raises(NotImplementedError, match="Use LRUCacheLoRAModelManager"):
        FixedRules().check_pin(table, 1)
    with pytest.raises(ValueError, match=r"Pinning failed. LoRA 1 is not registered\."):
        LRURules().check_pin(table, 1)
