"""Both managers against an obvious model, over thousands of random operations.

After each one: the same result or exception, slot table, orders and pins, and a bank
that equals one filled from scratch.
"""

import copy
from collections.abc import Callable

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lora_jax.adapters import Adapter, adapter_from_tensors
from lora_jax.bank import empty_bank, stage, write
from lora_jax.config import LoRAConfig
from lora_jax.errors import AdapterError
from lora_jax.manager import LoRAModelManager, LRUCacheLoRAModelManager, device
from lora_jax.packing import pack
from lora_jax.slots import Hold
from manager_model import ManagerModel

SLOTS, CAPACITY, WIDTH = 3, 5, 3
IDS = st.integers(1, 7)
VERSIONS = st.integers(0, 2)
ERRORS = (KeyError, ValueError, RuntimeError, NotImplementedError)


class Tiny(nnx.Module):
    """Two layers; adapters of even ids adapt the first alone."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.one = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.two = nnx.Linear(WIDTH, WIDTH, rngs=rngs)


def _adapter(id: int, version: int, rank: int) -> Adapter:
    rng = np.random.default_rng([id, version])
    tensors = {}
    for module in ("one", "two")[: 1 + id % 2]:
        for half, shape in (("A", (rank, WIDTH)), ("B", (WIDTH, rank))):
            values = rng.normal(size=shape).astype(np.float32)
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = values
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": id, "target_modules": []}
    return adapter_from_tensors(tensors, config, name=f"{id}v{version}", adapter_id=id)


ADAPTERS = {
    (id, version): _adapter(id, version, 1 + (id + version) % 3)
    for id in range(1, 8)
    for version in range(3)
}
TOO_LARGE = {id: _adapter(id, 9, 4) for id in range(1, 8)}


def _from_scratch(manager: LoRAModelManager) -> dict[tuple[int, int], list[np.ndarray]]:
    """What a slot of each adapter must hold, written alone into an empty bank."""
    empty = empty_bank(manager.sites, 1, np.dtype("float32"))
    filled = {}
    for key, adapter in ADAPTERS.items():
        packed = pack(adapter, manager.sites, np.dtype("float32"))
        bank = write(empty, 0, stage(empty, packed))
        filled[key] = [np.array(leaf[0]) for leaf in jax.tree.leaves(bank)]
    return filled


class Machine(RuleBasedStateMachine):
    """The operations; a subclass names the manager."""

    kind: type[LoRAModelManager]

    def __init__(self) -> None:
        super().__init__()
        config = LoRAConfig(max_loras=SLOTS, max_cpu_loras=CAPACITY, max_lora_rank=3)
        self.manager = self.kind(Tiny(), config)
        self.model = ManagerModel(
            self.kind is LRUCacheLoRAModelManager,
            CAPACITY,
            [None] * SLOTS,
            [None] * SLOTS,
        )
        self.scratch = _from_scratch(self.manager)
        self.holds: list[Hold] = []
        self.released: list[Hold] = []

    def both(
        self,
        do: Callable[[LoRAModelManager], object],
        expect: Callable[[ManagerModel], object],
    ) -> object:
        """Does an operation on both sides; they agree on result or exception."""
        trial = copy.deepcopy(self.model)
        try:
            expected = expect(trial)
        except ERRORS as error:
            with pytest.raises(type(error)):
                do(self.manager)
            return None
        self.model = trial
        result = do(self.manager)
        if expected is not None:
            assert result == expected
        return result

    @rule(id=IDS, version=VERSIONS)
    def add(self, id: int, version: int) -> None:
        adapter = ADAPTERS[id, version]
        self.both(lambda m: m.add_adapter(adapter), lambda m: m.add(id, version))

    @rule(id=IDS)
    def activate(self, id: int) -> None:
        self.both(lambda m: m.activate_adapter(id), lambda m: m.activate(id))

    @rule(id=IDS, version=VERSIONS)
    def serve(self, id: int, version: int) -> None:
        """The common way; without it most random operations meet absent ids."""
        self.add(id, version)
        self.activate(id)

    @rule(id=IDS, version=VERSIONS)
    def serve_and_hold(self, id: int, version: int) -> None:
        self.add(id, version)
        self.hold(id)

    @rule(id=IDS)
    def deactivate(self, id: int) -> None:
        self.both(lambda m: m.deactivate_adapter(id), lambda m: m.deactivate(id))

    @rule(id=IDS)
    def remove(self, id: int) -> None:
        self.both(lambda m: m.remove_adapter(id), lambda m: m.remove(id))

    @rule(id=IDS)
    def pin(self, id: int) -> None:
        self.both(lambda m: m.pin_adapter(id), lambda m: m.pin(id))

    @rule(id=IDS)
    def get(self, id: int) -> None:
        self.both(lambda m: m.get_adapter(id) is not None, lambda m: m.get(id))

    @rule(id=IDS, version=VERSIONS)
    def reload(self, id: int, version: int) -> None:
        prepared = self.manager.prepare(ADAPTERS[id, version])
        self.both(
            lambda m: m.replace_prepared(prepared), lambda m: m.reload(id, version)
        )

    @rule(id=IDS)
    def hold(self, id: int) -> None:
        expected: list[int] = []
        hold = self.both(
            lambda m: m.hold(id), lambda m: expected.append(m.hold(id)) or None
        )
        if isinstance(hold, Hold):
            assert hold.slot == expected[0]
            self.holds.append(hold)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hold = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.model.release(hold.slot)
        assert self.manager.release(hold)
        self.released.append(hold)

    @precondition(lambda self: self.released)
    @rule()
    def release_again(self) -> None:
        assert not self.manager.release(self.released[-1])

    @precondition(lambda self: self.model.lru)
    @rule()
    def remove_oldest(self) -> None:
        self.both(lambda m: m.remove_oldest_adapter(), lambda m: m.remove_oldest())

    @rule(times=st.integers(0, 9))
    def remove_all(self, times: int) -> None:
        if times == 0:
            self.both(lambda m: m.remove_all_adapters(), lambda m: m.remove_all())

    @rule(id=IDS)
    def fail_to_add(self, id: int) -> None:
        if id not in self.model.host:
            with pytest.raises(AdapterError, match="rank 4 exceeds max_lora_rank=3"):
                self.manager.add_adapter(TOO_LARGE[id])

    @rule(id=IDS)
    def fail_to_write(self, id: int) -> None:
        if id not in self.model.host or id in self.model.device:
            return
        works = device.stage_slot
        device.stage_slot = _no_memory
        try:
            with pytest.raises((MemoryError, ValueError, RuntimeError)):
                self.manager.activate_adapter(id)
        finally:
            device.stage_slot = works

    @rule(ids=st.lists(IDS, max_size=4))
    def ask(self, ids: list[int]) -> None:
        """`can_activate` is true exactly if activating one by one ends well."""
        assert self.manager.can_activate(ids) is (
            _fits(self.model, ids) and _fits(self.model, ids[::-1])
        )

    @invariant()
    def tables_agree(self) -> None:
        table, model = self.manager._table, self.model
        assert self.manager.lora_index_to_id == model.slots
        assert list(self.manager.list_adapters()) == model.host
        assert list(table.active) == model.device
        assert table.registered.pinned == model.host_pins
        assert table.active.pinned == model.device_pins
        assert len(self.manager) == len(model.host)

    @invariant()
    def bank_equals_one_from_scratch(self) -> None:
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self.manager.bank)]
        for slot, key in enumerate(self.model.contents):
            for i, leaf in enumerate(leaves):
                expected = np.zeros_like(leaf[slot])
                if key is not None:
                    expected = self.scratch[key][i]
                np.testing.assert_array_equal(leaf[slot], expected)


def _fits(model: ManagerModel, ids: list[int]) -> bool:
    trial = copy.deepcopy(model)
    try:
        for id in ids:
            trial.activate(id)
    except ERRORS:
        return False
    return set(ids) <= set(trial.device)


def _no_memory(*_: object) -> None:
    raise MemoryError("no device memory")


class FixedMachine(Machine):
    """The manager that evicts nobody."""

    kind = LoRAModelManager


class LRUMachine(Machine):
    """The manager that evicts."""

    kind = LRUCacheLoRAModelManager


STEPS = settings(max_examples=30, stateful_step_count=60)
TestFixed = FixedMachine.TestCase
TestFixed.settings = STEPS
TestLRU = LRUMachine.TestCase
TestLRU.settings = STEPS
