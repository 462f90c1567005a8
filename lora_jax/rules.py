"""What may be done to a slot table: never evict, or evict the least recently used.

Both answer the same questions about a `SlotTable` and change nothing, except for
the order of use. A plan that they return can be carried out; what cannot is an
exception here, before anything has happened.

Source: vLLM's `LoRAModelManager` (fixed) and `LRUCacheLoRAModelManager` (LRU),
texts of the exceptions included.
"""

from collections.abc import Collection, Iterable
from typing import Protocol, runtime_checkable

from lora_jax.lru import LRU
from lora_jax.slots import Activation, Registration, SlotTable

NO_SLOT = "No free lora slots"
NO_ROOM = "No free adapter slots."
ALL_PINNED = "All items are pinned, cannot remove oldest from the cache."
ALL_KEPT = (
    "All items are pinned or held by running requests, cannot remove oldest from "
    "the cache."
)
NO_PINS = (
    "Pinning is not supported in LoRAModelManager. "
    "Use LRUCacheLoRAModelManager for pinning"
)


@runtime_checkable
class Rules(Protocol):
    """What a manager asks before it acts."""

    def plan_registration(self, table: SlotTable, id: int) -> Registration:
        """Plans to register an id that is not registered."""
        ...

    def plan_activation(self, table: SlotTable, id: int) -> Activation:
        """Plans to give an id that is not active a slot."""
        ...

    def check_pin(self, table: SlotTable, id: int) -> None:
        """Raises if `id` cannot be pinned, whatever the slots."""
        ...

    def can_activate(self, table: SlotTable, ids: Iterable[int]) -> bool:
        """Says whether all of `ids` can be active at once."""
        ...

    def check_batch(
        self, table: SlotTable, ids: Iterable[int], twice: Collection[int]
    ) -> None:
        """Raises if `ids`, registered or not, cannot all be registered and active.

        Those `twice` need another slot: a running request holds their old version.
        """
        ...

    def added_again(self, table: SlotTable, id: int) -> None:
        """Notes the use that lies in adding a registered id."""
        ...

    def activated_again(self, table: SlotTable, id: int) -> None:
        """Notes the use that lies in activating an active id."""
        ...


class FixedRules:
    """Nobody is ever evicted: what does not fit is an error."""

    def plan_registration(self, table: SlotTable, id: int) -> Registration:
        """Plans to register `id`. Raises RuntimeError when the host is full."""
        if len(table.registered) >= table.capacity:
            raise RuntimeError(NO_ROOM)
        return Registration(id)

    def plan_activation(self, table: SlotTable, id: int) -> Activation:
        """Plans to give `id` the lowest free slot.

        Raises:
          ValueError: if no slot is free.
          KeyError: if `id` is not registered.
        """
        free = table.free_slots()
        if not free:
            raise ValueError(NO_SLOT)
        if id not in table.registered:
            raise KeyError(f"adapter {id} is not registered; add it first.")
        return Activation(id, free[0])

    def check_pin(self, table: SlotTable, id: int) -> None:
        """Raises NotImplementedError: without eviction there is nothing to pin."""
        raise NotImplementedError(NO_PINS)

    def can_activate(self, table: SlotTable, ids: Iterable[int]) -> bool:
        """Says whether all of `ids` can be active at once, besides those that are."""
        wanted = set(ids)
        return _all_registered(table, wanted) and self._have_slots(table, wanted)

    def check_batch(
        self, table: SlotTable, ids: Iterable[int], twice: Collection[int]
    ) -> None:
        """Raises ValueError if slots, RuntimeError if the host has no room for all."""
        wanted = set(ids)
        if not self._have_slots(table, wanted, len(twice)):
            raise ValueError(NO_SLOT)
        if len(wanted | set(table.registered)) > table.capacity:
            raise RuntimeError(NO_ROOM)

    def _have_slots(self, table: SlotTable, wanted: set[int], more: int = 0) -> bool:
        new = [id for id in wanted if id not in table.active]
        return len(new) + more <= len(table.free_slots())

    def added_again(self, table: SlotTable, id: int) -> None:
        """Nothing: this manager does not order by use here, as in vLLM."""

    def activated_again(self, table: SlotTable, id: int) -> None:
        """Nothing: this manager does not order by use here, as in vLLM."""


class LRURules:
    """The least recently used that is neither pinned nor held makes room."""

    def plan_registration(self, table: SlotTable, id: int) -> Registration:
        """Plans to register `id`. Raises RuntimeError if nobody may be evicted."""
        if len(table.registered) < table.capacity:
            return Registration(id)
        return Registration(id, self.plan_eviction(table))

    def plan_eviction(self, table: SlotTable) -> int:
        """Returns the registered id to evict next. Raises RuntimeError if none."""
        return _victim(table, table.registered)

    def plan_activation(self, table: SlotTable, id: int) -> Activation:
        """Plans to give `id` the lowest free slot, or the slot of the oldest.

        Raises:
          RuntimeError: if no slot is free and nobody may be evicted.
          KeyError: if `id` is not registered.
        """
        free = table.free_slots()
        victim = None if free else _victim(table, table.active)
        if id not in table.registered:
            raise KeyError(f"adapter {id} is not registered; add it first.")
        if victim is None:
            return Activation(id, free[0])
        return Activation(id, table.index_to_id.index(victim), victim)

    def check_pin(self, table: SlotTable, id: int) -> None:
        """Raises ValueError if `id` is not registered."""
        if id not in table.registered:
            raise ValueError(f"Pinning failed. LoRA {id} is not registered.")

    def can_activate(self, table: SlotTable, ids: Iterable[int]) -> bool:
        """Says whether all of `ids` can be active at once; others may be evicted."""
        wanted = set(ids)
        return _all_registered(table, wanted) and self._have_slots(table, wanted)

    def check_batch(
        self, table: SlotTable, ids: Iterable[int], twice: Collection[int]
    ) -> None:
        """Raises RuntimeError if pinned and held ones leave too little room for all."""
        wanted = set(ids)
        on_host = len(wanted) + len(_kept(table, table.registered, wanted))
        if not self._have_slots(table, wanted, len(twice)) or on_host > table.capacity:
            raise RuntimeError(_nobody_left(table))

    def _have_slots(self, table: SlotTable, wanted: set[int], more: int = 0) -> bool:
        taken = len(table.retired) + len(_kept(table, table.active, wanted))
        return len(wanted) + taken + more <= table.num_slots

    def added_again(self, table: SlotTable, id: int) -> None:
        """Makes `id` the newest on the host."""
        table.registered.touch(id)

    def activated_again(self, table: SlotTable, id: int) -> None:
        """Makes `id` the newest on the device; the host's order stays, as in vLLM."""
        table.active.touch(id)


def plan_replacement(rules: Rules, table: SlotTable, id: int) -> Activation | None:
    """Plans where another version of a registered id goes; None if it is not active.

    The old version leaves its slot, unless a running request holds it: then the new one
    needs another slot.

    Raises:
      ValueError, RuntimeError: as `plan_activation`, if there is no other slot.
    """
    slot = table.slot_of(id)
    if slot is None:
        return None
    free = table.free_slots() if table.is_held(id) else [*table.free_slots(), slot]
    return Activation(id, min(free)) if free else rules.plan_activation(table, id)


def check_room(rules: Rules, table: SlotTable, id: int) -> Registration:
    """Plans to register an id whose activation will follow.

    Raises:
      ValueError, RuntimeError: as `plan_registration` and `plan_activation`, if the
        host or the device has no room.
    """
    plan = rules.plan_registration(table, id)
    if plan.evicts not in table.active:
        try:
            rules.plan_activation(table, id)
        except KeyError:  # It is raised last, when a slot was found.
            pass
    return plan


def can_load(rules: Rules, table: SlotTable, id: int) -> bool:
    """Says whether an id, registered or not, could be registered and active."""
    if id in table.registered:
        return rules.can_activate(table, [id])
    try:
        check_room(rules, table, id)
    except (ValueError, RuntimeError):
        return False
    return True


def held_among(table: SlotTable, ids: Iterable[int]) -> list[int]:
    """Returns those of `ids` whose slot a running request holds."""
    return [id for id in ids if id in table.active and table.is_held(id)]


def check_batch_alone(
    table: SlotTable, ids: Iterable[int], twice: Collection[int]
) -> None:
    """Raises ValueError if `ids` lack slots even after all other ids are removed."""
    wanted = set(ids)
    held = [id for id in table.active if id not in wanted and table.is_held(id)]
    taken = len(table.retired) + len(held) + len(twice)
    if len(wanted) + taken > table.num_slots:
        raise ValueError(NO_SLOT)


def _all_registered(table: SlotTable, ids: Collection[int]) -> bool:
    return all(id in table.registered for id in ids)


def _kept(table: SlotTable, order: LRU, wanted: set[int]) -> list[int]:
    kept = order.pinned | table.holds.keys()
    return [id for id in kept if id in order and id not in wanted]


def _victim(table: SlotTable, order: LRU) -> int:
    victim = order.oldest(kept=table.holds)
    if victim is None:
        raise RuntimeError(_nobody_left(table))
    return victim


def _nobody_left(table: SlotTable) -> str:
    return ALL_KEPT if table.holds or table.retired else ALL_PINNED
