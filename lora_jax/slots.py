"""Who is registered, who sits in which slot, and who must stay. Standard library only.

    registered (host, LRU)   [ 3 | 9 | 1 | 5 ]        every adapter that has a copy here
    active     (device, LRU)     [ 9 | 1 ]            those of them that own a slot
    slots                    [ 1 | - | 9 | (9) ]      (9) retired: its id has moved on,
                                                      its holders still use the slot

Asking and doing are apart: `rules.py` plans and may refuse, and changes nothing; what
is here carries a plan out and cannot fail. So whatever lies between the two, such as a
device write, may fail and leaves the table as it was.
"""

from dataclasses import dataclass, field

from lora_jax.lru import LRU


@dataclass(frozen=True)
class Registration:
    """The decision to register `id`, after the adapter `evicts` (if any) has left."""

    id: int
    evicts: int | None = None


@dataclass(frozen=True)
class Activation:
    """The decision to put `id` into `slot`, after `evicts` (if any) has left it."""

    id: int
    slot: int
    evicts: int | None = None


@dataclass(frozen=True, eq=False)
class Hold:
    """A running request's claim on one version of an adapter, in one slot.

    While it lasts the slot's contents do not change, whatever happens to the id.
    """

    id: int
    slot: int


@dataclass
class SlotTable:
    """The bookkeeping of both tiers. Holds ids, never arrays.

    Args:
      num_slots: slots on the device.
      capacity: adapters on the host, >= num_slots.
    """

    num_slots: int
    capacity: int
    registered: LRU = field(default_factory=LRU)
    active: LRU = field(default_factory=LRU)
    index_to_id: list[int | None] = field(init=False)
    retired: dict[int, set[Hold]] = field(default_factory=dict)
    holds: dict[int, set[Hold]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index_to_id = [None] * self.num_slots
        self._slot_of: dict[int, int] = {}

    def slot_of(self, id: int) -> int | None:
        """Returns the slot of an active adapter; None if it has none."""
        return self._slot_of.get(id)

    def is_held(self, id: int) -> bool:
        """Says whether a running request holds the adapter that `id` names now."""
        return id in self.holds

    def free_slots(self) -> list[int]:
        """Returns the slots that hold nobody's weights, lowest first."""
        return [
            slot
            for slot, id in enumerate(self.index_to_id)
            if id is None and slot not in self.retired
        ]

    def layout(self) -> tuple[int | None, ...]:
        """Returns the id in each slot: the key under which a routing may be kept."""
        return tuple(self.index_to_id)

    def register(self, plan: Registration) -> None:
        """Evicts whom the plan names, and registers its id as the newest."""
        if plan.evicts is not None:
            self.unregister(plan.evicts)
        self.registered.add(plan.id)

    def unregister(self, id: int) -> bool:
        """Deactivates and forgets `id`; False if it was not registered."""
        self.deactivate(id)
        if id not in self.registered:
            return False
        self.registered.remove(id)
        return True

    def activate(self, plan: Activation) -> None:
        """Gives the planned slot to the planned id, now the newest in both tiers."""
        if plan.evicts is not None:
            self.deactivate(plan.evicts)
        self.index_to_id[plan.slot] = plan.id
        self._slot_of[plan.id] = plan.slot
        self.active.add(plan.id)
        self.registered.touch(plan.id)

    def deactivate(self, id: int) -> bool:
        """Takes `id` out of its slot; False if it had none. A held slot is retired."""
        slot = self._slot_of.pop(id, None)
        if slot is None:
            return False
        self.active.remove(id)
        self.index_to_id[slot] = None
        if id in self.holds:
            self.retired[slot] = self.holds.pop(id)
        return True

    def clear(self) -> None:
        """Forgets every adapter, pinned ones too; held slots are retired."""
        for id in list(self.registered):
            self.unregister(id)

    def hold(self, id: int) -> Hold:
        """Returns a claim on the slot of `id`. Raises KeyError if it is not active."""
        claim = Hold(id, self._slot_of[id])
        self.holds.setdefault(id, set()).add(claim)
        return claim

    def release(self, claim: Hold) -> bool:
        """Ends a claim; False if it had ended. The last one frees a retired slot."""
        if claim in self.holds.get(claim.id, ()):
            _discard(self.holds, claim.id, claim)
            return True
        if claim in self.retired.get(claim.slot, ()):
            _discard(self.retired, claim.slot, claim)
            return True
        return False


def _discard(claims: dict[int, set[Hold]], key: int, claim: Hold) -> None:
    claims[key].discard(claim)
    if not claims[key]:
        del claims[key]
