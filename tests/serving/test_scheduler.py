"""The scheduler's rules, against a gate of plain sets."""

import pytest

from lora_jax.serving.scheduler import Admission, Refusal, Scheduler
from lora_jax.slots import Hold


class FakeGate:
    """`slots` slots; an adapter in use keeps its slot, an idle one is evicted."""

    def __init__(self, slots, *, pinned=(), broken=()):
        self.table = [None] * slots
        for slot, adapter_id in enumerate(pinned):
            self.table[slot] = adapter_id
        self.pinned = set(pinned)
        self.broken = set(broken)
        self.claims = []

    def _free(self):
        held = {claim.id for claim in self.claims} | self.pinned
        return [slot for slot, id in enumerate(self.table) if id not in held]

    def can_acquire(self, adapter_id):
        return adapter_id in self.table or bool(self._free())

    def acquire(self, adapter_id):
        if adapter_id in self.broken:
            raise ValueError(f"adapter {adapter_id} is broken")
        if adapter_id not in self.table:
            self.table[self._free()[0]] = adapter_id
        claim = Hold(adapter_id, self.table.index(adapter_id))
        self.claims.append(claim)
        return claim

    def release(self, claim):
        self.claims.remove(claim)

    def is_pinned(self, adapter_id):
        return adapter_id in self.pinned


def make(rows, slots, adapters, *, patience=100, **gate_options):
    """A scheduler whose queue holds one request for each entry of `adapters`."""
    gate = FakeGate(slots, **gate_options)
    scheduler = Scheduler(rows, gate, patience=patience)
    for index, adapter_id in enumerate(adapters):
        scheduler.add(str(index), adapter_id)
    return scheduler, gate


def started(scheduler):
    admissions, refusals = scheduler.admit()
    assert not refusals
    return [int(admission.request_id) for admission in admissions]


def test_requests_take_rows_in_order_and_slots_by_adapter():
    scheduler, _ = make(3, 2, [7, None, 8, 7])
    admissions, _ = scheduler.admit()
    assert admissions == [
        Admission("0", 0, 7, 0),
        Admission("1", 1, None, None),
        Admission("2", 2, 8, 1),
    ]
    assert scheduler.waiting == ("3",)
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 1)


def test_a_request_without_a_slot_is_passed_over_and_keeps_its_place():
    scheduler, _ = make(4, 1, [1, 2, 3, 1, None])
    assert started(scheduler) == [0, 3, 4]
    assert scheduler.waiting == ("1", "2")
    scheduler.finish(0)
    assert started(scheduler) == []  # request 3 still uses adapter 1
    scheduler.finish(1)
    assert started(scheduler) == [1]


def test_base_rows_never_wait_for_a_slot():
    scheduler, _ = make(4, 1, [1, 2, None, 2, None])
    assert started(scheduler) == [0, 2, 4]


def test_an_adapter_in_use_is_never_evicted():
    scheduler, gate = make(3, 2, [1, 2, 3])
    assert started(scheduler) == [0, 1]
    assert gate.table == [1, 2]
    scheduler.finish(1)
    assert started(scheduler) == [2]
    assert gate.table == [1, 3]


def test_all_claims_are_given_back():
    scheduler, gate = make(2, 2, [1, 1, 2, None])
    while scheduler.num_waiting or scheduler.num_running:
        for admission in scheduler.admit()[0]:
            scheduler.finish(admission.row)
    assert gate.claims == []


def test_endless_traffic_does_not_starve_another_adapter():
    scheduler, _ = make(2, 2, [1, 2, 3], patience=3)
    arrived = 2
    rows = {int(a.request_id): a.row for a in scheduler.admit()[0]}
    for _ in range(20):
        # One row ends and one more request of adapters 1 and 2 comes, for ever.
        oldest = min(rows)
        scheduler.finish(rows.pop(oldest))
        arrived += 1
        scheduler.add(str(arrived), 1 + arrived % 2)
        rows |= {int(a.request_id): a.row for a in scheduler.admit()[0]}
        if 2 in rows:
            return
    pytest.fail("the request of adapter 3 never started")


def test_base_rows_go_on_while_an_adapter_closes():
    scheduler, _ = make(2, 1, [1, 2, 1, None, None], patience=1)
    assert started(scheduler) == [0, 2]  # passes over request 1, once
    scheduler.finish(0)
    scheduler.add("5", 1)
    assert started(scheduler) == [3]
    scheduler.finish(0)
    assert started(scheduler) == [4]


def test_a_pinned_adapter_does_not_close():
    scheduler, _ = make(3, 2, [1, 2, 3, 2, 1, 2], patience=1, pinned=[1])
    assert started(scheduler) == [0, 1, 3]  # passes over request 2: overdue
    scheduler.finish(0)
    assert started(scheduler) == [4]  # adapter 1 is pinned, 2 closes


def test_a_broken_adapter_ends_its_own_request_only():
    scheduler, _ = make(3, 2, [1, 9, 2], broken=[9])
    admissions, refusals = scheduler.admit()
    assert [a.request_id for a in admissions] == ["0", "2"]
    assert [(r.request_id, str(r.error)) for r in refusals] == [
        ("1", "adapter 9 is broken")
    ]
    assert isinstance(refusals[0], Refusal)
    assert scheduler.num_waiting == 0


def test_a_withdrawn_request_does_not_start():
    scheduler, _ = make(2, 1, [1, 1])
    assert scheduler.withdraw("0")
    assert not scheduler.withdraw("0")
    assert started(scheduler) == [1]
