"""`SlotTable`: what the doing half does."""

import pytest

from lora_jax.slots import Activation, Registration, SlotTable


def _table() -> SlotTable:
    table = SlotTable(2, 3)
    for id in (7, 8):
        table.register(Registration(id))
    table.activate(Activation(7, 1))
    return table


def test_the_layout_names_the_id_in_each_slot() -> None:
    table = _table()
    assert table.layout() == (None, 7)
    assert (table.slot_of(7), table.slot_of(8), table.free_slots()) == (1, None, [0])


def test_an_eviction_leaves_nothing_of_its_victim() -> None:
    table = _table()
    table.register(Registration(9, evicts=7))
    assert table.layout() == (None, None)
    assert list(table.registered) == [8, 9]
    assert list(table.active) == []


def test_a_hold_needs_a_slot() -> None:
    with pytest.raises(KeyError, match="8"):
        _table().hold(8)


@pytest.mark.parametrize("leave", ["deactivate", "unregister", "clear"])
def test_holders_keep_the_slot_when_the_id_leaves(leave: str) -> None:
    table = _table()
    claim = table.hold(7)
    getattr(table, leave)(*([] if leave == "clear" else [7]))
    assert claim.slot == 1
    assert table.layout() == (None, None)
    assert table.free_slots() == [0]
    assert not table.is_held(7)
    assert table.release(claim)
    assert table.free_slots() == [0, 1]


def test_old_and_new_holders_of_an_id_are_told_apart() -> None:
    table = _table()
    old = table.hold(7)
    table.deactivate(7)
    table.activate(Activation(7, 0))
    new = table.hold(7)
    assert (old.slot, new.slot) == (1, 0)
    assert table.release(old)
    assert table.is_held(7)
    assert table.free_slots() == [1]


def test_clear_forgets_pins() -> None:
    table = _table()
    table.registered.pin(7)
    table.active.pin(7)
    table.clear()
    assert (len(table.registered), len(table.active)) == (0, 0)
    assert not table.registered.pinned | table.active.pinned
