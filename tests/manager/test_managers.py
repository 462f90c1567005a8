"""The two managers: recorded traces, numbers of mixed batches, nothing half done."""

from collections.abc import Callable

import numpy as np
import pytest

from helpers import TOLERANCE, WIDTH, Toy, expected_rows, inputs, make_adapter
from lora_jax.adapters import Adapter, adapter_from_tensors
from lora_jax.config import LoRAConfig
from lora_jax.errors import AdapterError
from lora_jax.manager import LoRAModelManager, LRUCacheLoRAModelManager
from lora_jax.routing import LoRAMapping
from manager_traces import FIXED, LRU, Step, read_steps

MANAGERS = [LoRAModelManager, LRUCacheLoRAModelManager]
ADAPTERS = {id: make_adapter(id, id) for id in (1, 2, 3, 4)}
CONFIG = LoRAConfig(max_loras=2, max_cpu_loras=3, max_lora_rank=8)

DO: dict[str, Callable[[LoRAModelManager, int], object]] = {
    "add": lambda manager, id: manager.add_adapter(ADAPTERS[id]),
    "act": lambda manager, id: manager.activate_adapter(id),
    "deact": lambda manager, id: manager.deactivate_adapter(id),
    "rem": lambda manager, id: manager.remove_adapter(id),
    "pin": lambda manager, id: manager.pin_adapter(id),
    "get": lambda manager, id: manager.get_adapter(id) is ADAPTERS[id],
    "old": lambda manager, _: manager.remove_oldest_adapter(),
}


def _state(manager: LoRAModelManager) -> tuple[object, ...]:
    table = manager._table
    return (
        manager.lora_index_to_id,
        list(manager.list_adapters()),
        list(table.active),
        (sorted(table.registered.pinned), sorted(table.active.pinned)),
    )


def _bank(manager: LoRAModelManager) -> dict[tuple[str, str], np.ndarray]:
    return {
        (name, key): np.array(array)
        for name, arrays in manager.bank.arrays.items()
        for key, array in arrays.items()
    }


def _mapping(*ids: int) -> LoRAMapping:
    return LoRAMapping(ids, ids)


@pytest.mark.parametrize(
    ("kind", "trace"), [(LoRAModelManager, FIXED), (LRUCacheLoRAModelManager, LRU)]
)
def test_recorded_traces_come_out_exactly(
    kind: type[LoRAModelManager], trace: str
) -> None:
    manager = kind(Toy(), CONFIG)
    for step in read_steps(trace):
        try:
            result = DO[step.operation](manager, step.id)
        except (KeyError, RuntimeError, ValueError) as error:
            result = type(error).__name__
        assert Step(step.operation, step.id, result, *_state(manager)) == step


@pytest.mark.parametrize("kind", MANAGERS)
def test_a_mixed_batch_equals_each_rows_merged_weights(
    kind: type[LoRAModelManager],
) -> None:
    manager = kind(Toy(), CONFIG)
    for id in (1, 2):
        manager.add_adapter(ADAPTERS[id])
        manager.activate_adapter(id)
    x = inputs(5)
    for ids in ((1, 0, 2, 2, 0), (2, 1, 0, -1, 1), (0, 0, 0, 0, 0)):
        manager.set_adapter_mapping(_mapping(*ids))
        expected = expected_rows(Toy(), [ADAPTERS.get(id) for id in ids], x)
        got = np.asarray(manager.model(x))
        np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=0)
        base = [row for row, id in enumerate(ids) if id <= 0]
        np.testing.assert_array_equal(got[base], np.asarray(Toy()(x))[base])


def test_a_reused_slot_keeps_nothing_of_its_former_occupant() -> None:
    manager = LRUCacheLoRAModelManager(
        Toy(), LoRAConfig(max_loras=1, max_cpu_loras=2, max_lora_rank=8)
    )
    full = make_adapter(11, 8)
    small = make_adapter(12, 2, modules=["blocks.0.q_proj"])
    x = inputs(3)
    for adapter in (full, small, full, small):
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)
        manager.set_adapter_mapping(_mapping(adapter.id, 0, adapter.id))
        expected = expected_rows(Toy(), [adapter, None, adapter], x)
        np.testing.assert_allclose(manager.model(x), expected, atol=TOLERANCE, rtol=0)


def test_a_visit_changes_no_host_copy_and_every_visit_is_the_same() -> None:
    manager = LRUCacheLoRAModelManager(
        Toy(), LoRAConfig(max_loras=1, max_cpu_loras=2, max_lora_rank=8)
    )
    x, seen = inputs(2), []
    packed: list[dict[str, dict[str, bytes]]] = []
    for id in (1, 2, 1, 2, 1):
        manager.add_adapter(ADAPTERS[id])
        manager.activate_adapter(id)
        manager.set_adapter_mapping(_mapping(id, id))
        seen.append(np.asarray(manager.model(x)))
        packed.append(
            {
                name: {key: array.tobytes() for key, array in slot.items()}
                for name, slot in manager._tiers.host[id].packed.sites.items()
            }
        )
    for again in (2, 4):
        np.testing.assert_array_equal(seen[again], seen[0])
        assert packed[again] == packed[0]


@pytest.mark.parametrize("kind", MANAGERS)
def test_an_adapter_that_cannot_be_served_changes_nothing(
    kind: type[LoRAModelManager],
) -> None:
    manager = kind(Toy(), LoRAConfig(max_loras=1, max_lora_rank=8))
    manager.add_adapter(ADAPTERS[1])
    manager.activate_adapter(1)
    state, bank = _state(manager), _bank(manager)
    for _ in range(2):
        with pytest.raises(AdapterError, match=r"rank 9 exceeds max_lora_rank=8"):
            manager.add_adapter(make_adapter(5, 9))
        with pytest.raises(AdapterError, match=r"blocks\.7\.fc: not a module"):
            manager.add_adapter(_stranger())
    assert _state(manager) == state
    assert all((bank[key] == array).all() for key, array in _bank(manager).items())


def _stranger() -> Adapter:
    key = "base_model.model.blocks.7.fc"
    ones = np.ones((2, WIDTH), np.float32)
    return adapter_from_tensors(
        {f"{key}.lora_A.weight": ones, f"{key}.lora_B.weight": ones.T.copy()},
        {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["fc"]},
        name="stranger",
        adapter_id=6,
    )


def test_a_failing_device_write_changes_nothing_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = LRUCacheLoRAModelManager(Toy(), CONFIG)
    for id in (1, 2, 3):
        manager.add_adapter(ADAPTERS[id])
    manager.activate_adapter(1)
    manager.activate_adapter(2)
    state = _state(manager)

    def fail(*_: object) -> None:
        raise MemoryError("no device memory")

    with monkeypatch.context() as patch:
        patch.setattr("lora_jax.manager.device.stage_slot", fail)
        for _ in range(2):
            with pytest.raises(MemoryError, match="no device memory"):
                manager.activate_adapter(3)
            assert _state(manager) == state
    assert manager.activate_adapter(3)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (LoRAModelManager, ValueError, "No free lora slots"),
        (LRUCacheLoRAModelManager, KeyError, "9"),
    ],
)
def test_activating_an_unregistered_id_changes_nothing(
    kind: type[LoRAModelManager], error: type[Exception], text: str
) -> None:
    manager = kind(Toy(), CONFIG)
    with pytest.raises(KeyError, match="9"):
        manager.activate_adapter(9)
    for id in (1, 2):
        manager.add_adapter(ADAPTERS[id])
        manager.activate_adapter(id)
    state = _state(manager)
    with pytest.raises(error, match=text):
        manager.activate_adapter(9)
    assert _state(manager) == state


def test_the_base_manager_pins_nothing() -> None:
    with pytest.raises(NotImplementedError, match="Use LRUCacheLoRAModelManager"):
        LoRAModelManager(Toy(), CONFIG).pin_adapter(1)


def test_the_lru_manager_pins_only_what_is_registered() -> None:
    manager = LRUCacheLoRAModelManager(Toy(), CONFIG)
    with pytest.raises(ValueError, match=r"Pinning failed. LoRA 4 is not registered\."):
        manager.pin_adapter(4)


def test_a_pin_that_finds_no_slot_leaves_no_pin() -> None:
    manager = LRUCacheLoRAModelManager(Toy(), CONFIG)
    for id in (1, 2, 3):
        manager.add_adapter(ADAPTERS[id])
    manager.pin_adapter(1)
    manager.pin_adapter(2)
    state = _state(manager)
    with pytest.raises(RuntimeError, match=r"^All items are pinned, cannot remove"):
        manager.pin_adapter(3)
    assert _state(manager) == state


@pytest.mark.parametrize("kind", MANAGERS)
def test_a_full_host_is_an_error_or_an_eviction(kind: type[LoRAModelManager]) -> None:
    manager = kind(Toy(), CONFIG)
    for id in (1, 2, 3):
        manager.add_adapter(ADAPTERS[id])
    if kind is LoRAModelManager:
        with pytest.raises(RuntimeError, match=r"^No free adapter slots\.$"):
            manager.add_adapter(ADAPTERS[4])
        assert len(manager) == 3
    else:
        assert manager.add_adapter(ADAPTERS[4])
        assert list(manager.list_adapters()) == [2, 3, 4]


@pytest.mark.parametrize("kind", MANAGERS)
def test_remove_all_empties_everything(kind: type[LoRAModelManager]) -> None:
    manager = kind(Toy(), CONFIG)
    for id in (1, 2):
        manager.add_adapter(ADAPTERS[id])
        manager.activate_adapter(id)
    if kind is LRUCacheLoRAModelManager:
        manager.pin_adapter(1)
    manager.remove_all_adapters()
    assert _state(manager) == ([None, None], [], [], ([], []))
    assert not any(array.any() for array in _bank(manager).values())
    assert manager.get_adapter(1) is None


def test_the_oldest_of_none_is_false() -> None:
    assert not LRUCacheLoRAModelManager(Toy(), CONFIG).remove_oldest_adapter()


def test_no_target_modules_leave_the_base_model_alone() -> None:
    manager = LoRAModelManager(Toy(), LoRAConfig(target_modules=[]))
    assert (len(manager.sites), manager.memory().device) == (0, 0)
    with pytest.raises(AdapterError, match="not a module that this model can adapt"):
        manager.add_adapter(ADAPTERS[1])
    manager.set_adapter_mapping(_mapping(0, 0))
    np.testing.assert_array_equal(manager.model(inputs(2)), Toy()(inputs(2)))


def test_sizes_go_by_vllms_names() -> None:
    manager = LoRAModelManager(Toy(), CONFIG)
    assert (manager.capacity, manager.lora_slots, manager.adapter_slots) == (3, 2, 2)
    assert set(manager.sites) == {
        f"blocks.{layer}.{name}"
        for layer in (0, 1)
        for name in ("qkv_proj", "o_proj", "fc")
    }
