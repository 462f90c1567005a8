"""Decides which waiting request takes which row. Holds no arrays.

The batch has a fixed number of rows. A request waits until a row is free and its
adapter has, or can get, a slot. Rules:

- Requests start in the order they came, except that one whose adapter cannot get a
  slot is passed over; it keeps its place. Base rows need no slot and never wait for
  one.
- An adapter that a row uses is held: nothing evicts it.
- No request waits for ever. When `patience` requests have started since one was first
  passed over, it makes one of the adapters in use *close*, the one in use for longest:
  no new request of a closing adapter starts, so its rows run out and its slot becomes
  free.

It does not know what a slot is made of: `AdapterGate` asks and acts.
"""

import dataclasses
from typing import Protocol, runtime_checkable

from lora_jax.slots import Hold


@runtime_checkable
class AdapterGate(Protocol):
    """Gives adapters to rows and takes them back."""

    def can_acquire(self, adapter_id: int) -> bool:
        """Whether the adapter has, or can get, a slot without evicting a held one."""
        ...

    def acquire(self, adapter_id: int) -> Hold:
        """Puts the adapter into a slot and holds it there."""
        ...

    def release(self, claim: Hold) -> None:
        """Ends a claim."""
        ...

    def is_pinned(self, adapter_id: int) -> bool:
        """Whether the adapter keeps its slot when no row uses it."""
        ...


@dataclasses.dataclass(eq=False)
class Ticket:
    """One request's place in the queue or the batch.

    Attributes:
      request_id: unique among the tickets in flight.
      adapter_id: id of its adapter; None for the base model.
      passed_at: how many requests had started when it was first passed over; None if
        it never was.
      claim: on its adapter, while it runs.
    """

    request_id: str
    adapter_id: int | None
    passed_at: int | None = None
    claim: Hold | None = None


@dataclasses.dataclass(frozen=True)
class Admission:
    """A request that starts now in `row`; adapter and slot are None for the base."""

    request_id: str
    row: int
    adapter_id: int | None
    slot: int | None


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A request that cannot start because its adapter could not be put in a slot."""

    request_id: str
    error: Exception


class Scheduler:
    """The queue and the rows; see the module's text for the rules.

    Args:
      num_rows: rows of the batch, at least 1.
      gate: gives slots to adapters.
      patience: starts after which a request that was passed over makes one close.
    """

    def __init__(self, num_rows: int, gate: AdapterGate, *, patience: int) -> None:
        self._gate = gate
        self._patience = patience
        self._waiting: dict[str, Ticket] = {}
        self._rows: list[Ticket | None] = [None] * num_rows
        # Rows of each adapter in use; the order is the order of first use.
        self._in_use: dict[int, int] = {}
        self._started = 0

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of the requests in the queue, first first."""
        return tuple(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Length of the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Rows in use."""
        return sum(ticket is not None for ticket in self._rows)

    def add(self, request_id: str, adapter_id: int | None) -> None:
        """Puts a request at the end of the queue."""
        assert request_id not in self._waiting
        self._waiting[request_id] = Ticket(request_id, adapter_id)

    def withdraw(self, request_id: str) -> bool:
        """Takes a request out of the queue; False if it is not there."""
        return self._waiting.pop(request_id, None) is not None

    def admit(self) -> tuple[list[Admission], list[Refusal]]:
        """Starts every request that can start now.

        Returns:
          The admissions, and the requests whose adapter failed to load: those have
          left the queue and run nowhere.
        """
        admissions: list[Admission] = []
        refusals: list[Refusal] = []
        free_rows = [row for row, ticket in enumerate(self._rows) if ticket is None]
        if not free_rows:
            return admissions, refusals
        blocked = self._closing()
        for ticket in list(self._waiting.values()):
            if not free_rows:
                break
            if not self._may_start(ticket, blocked):
                if ticket.passed_at is None:
                    ticket.passed_at = self._started
                continue
            del self._waiting[ticket.request_id]
            try:
                self._claim(ticket)
            except Exception as error:
                refusals.append(Refusal(ticket.request_id, error))
                continue
            admissions.append(self._place(ticket, free_rows.pop(0)))
        return admissions, refusals

    def finish(self, row: int) -> None:
        """Frees a row and gives its adapter back."""
        ticket = self._rows[row]
        assert ticket is not None
        self._rows[row] = None
        if ticket.claim is None or ticket.adapter_id is None:
            return
        self._gate.release(ticket.claim)
        self._in_use[ticket.adapter_id] -= 1
        if not self._in_use[ticket.adapter_id]:
            del self._in_use[ticket.adapter_id]

    def _may_start(self, ticket: Ticket, blocked: set[int]) -> bool:
        """Says whether it can; notes an adapter that cannot get a slot in `blocked`.

        Within one pass nothing is given back, so what is blocked stays so.
        """
        adapter_id = ticket.adapter_id
        if adapter_id is None:
            return True
        if adapter_id in blocked:
            return False
        if self._gate.can_acquire(adapter_id):
            return True
        blocked.add(adapter_id)
        return False

    def _claim(self, ticket: Ticket) -> None:
        if ticket.adapter_id is None:
            return
        ticket.claim = self._gate.acquire(ticket.adapter_id)
        self._in_use[ticket.adapter_id] = self._in_use.get(ticket.adapter_id, 0) + 1

    def _place(self, ticket: Ticket, row: int) -> Admission:
        self._rows[row] = ticket
        self._started += 1
        slot = None if ticket.claim is None else ticket.claim.slot
        return Admission(ticket.request_id, row, ticket.adapter_id, slot)

    def _closing(self) -> set[int]:
        """One adapter in use for each adapter that has waited past its patience."""
        overdue: set[int | None] = set()
        for ticket in self._waiting.values():
            # Passed-over requests stand first in the queue, the longest waiting first.
            if (
                ticket.passed_at is None
                or self._started - ticket.passed_at < self._patience
            ):
                break
            if ticket.adapter_id not in self._in_use:
                overdue.add(ticket.adapter_id)
        # Closing a pinned adapter frees no slot.
        used = [id for id in self._in_use if not self._gate.is_pinned(id)]
        return set(used[: len(overdue)])
