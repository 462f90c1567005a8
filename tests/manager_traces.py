"""Traces of vLLM 0.32's managers, recorded by running them; and their reader.

A line reads: operation id | result or exception | slot table | registered ids | active
ids (both oldest first) | pinned ids. `old` is `remove_oldest_adapter`, `get` is
`get_adapter`.
"""

import ast
import re
from dataclasses import dataclass

FIXED = """\
add 1 | True | [None, None] | [1] | [] | pins cpu [] gpu []
act 1 | True | [1, None] | [1] | [1] | pins cpu [] gpu []
add 1 | False | [1, None] | [1] | [1] | pins cpu [] gpu []
act 1 | False | [1, None] | [1] | [1] | pins cpu [] gpu []
add 2 | True | [1, None] | [1, 2] | [1] | pins cpu [] gpu []
act 2 | True | [1, 2] | [1, 2] | [1, 2] | pins cpu [] gpu []
add 3 | True | [1, 2] | [1, 2, 3] | [1, 2] | pins cpu [] gpu []
act 3 | ValueError | [1, 2] | [1, 2, 3] | [1, 2] | pins cpu [] gpu []
add 4 | RuntimeError | [1, 2] | [1, 2, 3] | [1, 2] | pins cpu [] gpu []
rem 2 | True | [1, None] | [1, 3] | [1] | pins cpu [] gpu []
rem 2 | False | [1, None] | [1, 3] | [1] | pins cpu [] gpu []
act 3 | True | [1, 3] | [1, 3] | [1, 3] | pins cpu [] gpu []
rem 1 | True | [None, 3] | [3] | [3] | pins cpu [] gpu []
add 1 | True | [None, 3] | [3, 1] | [3] | pins cpu [] gpu []
act 1 | True | [1, 3] | [3, 1] | [3, 1] | pins cpu [] gpu []
"""
"""The base manager: 2 slots, 3 adapters on the host."""

LRU = """\
add 1 | True | [None, None] | [1] | [] | pins cpu [] gpu []
act 1 | True | [1, None] | [1] | [1] | pins cpu [] gpu []
add 2 | True | [1, None] | [1, 2] | [1] | pins cpu [] gpu []
act 2 | True | [1, 2] | [1, 2] | [1, 2] | pins cpu [] gpu []
add 3 | True | [1, 2] | [1, 2, 3] | [1, 2] | pins cpu [] gpu []
act 3 | True | [3, 2] | [1, 2, 3] | [2, 3] | pins cpu [] gpu []
act 2 | False | [3, 2] | [1, 2, 3] | [3, 2] | pins cpu [] gpu []
act 1 | True | [1, 2] | [2, 3, 1] | [2, 1] | pins cpu [] gpu []
get 3 | True | [1, 2] | [2, 1, 3] | [2, 1] | pins cpu [] gpu []
add 4 | True | [1, None] | [1, 3, 4] | [1] | pins cpu [] gpu []
pin 3 | True | [1, 3] | [1, 4, 3] | [1, 3] | pins cpu [3] gpu [3]
act 1 | False | [1, 3] | [1, 4, 3] | [3, 1] | pins cpu [3] gpu [3]
act 4 | True | [4, 3] | [1, 3, 4] | [3, 4] | pins cpu [3] gpu [3]
act 1 | True | [1, 3] | [3, 4, 1] | [3, 1] | pins cpu [3] gpu [3]
deact 3 | True | [1, None] | [3, 4, 1] | [1] | pins cpu [3] gpu []
act 4 | True | [1, 4] | [3, 1, 4] | [1, 4] | pins cpu [3] gpu []
pin 1 | True | [1, 4] | [3, 1, 4] | [1, 4] | pins cpu [1, 3] gpu [1]
pin 4 | True | [1, 4] | [3, 1, 4] | [1, 4] | pins cpu [1, 3, 4] gpu [1, 4]
act 3 | RuntimeError | [1, 4] | [3, 1, 4] | [1, 4] | pins cpu [1, 3, 4] gpu [1, 4]
pin 3 | RuntimeError | [1, 4] | [3, 1, 4] | [1, 4] | pins cpu [1, 3, 4] gpu [1, 4]
rem 4 | True | [1, None] | [3, 1] | [1] | pins cpu [1, 3] gpu [1]
pin 3 | True | [1, 3] | [1, 3] | [1, 3] | pins cpu [1, 3] gpu [1, 3]
pin 4 | ValueError | [1, 3] | [1, 3] | [1, 3] | pins cpu [1, 3] gpu [1, 3]
old | RuntimeError | [1, 3] | [1, 3] | [1, 3] | pins cpu [1, 3] gpu [1, 3]
old | RuntimeError | [1, 3] | [1, 3] | [1, 3] | pins cpu [1, 3] gpu [1, 3]
"""
"""The LRU manager: 2 slots, 3 adapters on the host."""

LRU_WORKER = """\
[1, 2] | ok | [1, 2, None, None] | [1, 2]
[1, 3, 4] | ok | [1, 2, 3, 4] | [2, 1, 3, 4]
[1, 2, 5] | ok | [1, 2, 5, 4] | [4, 1, 2, 5]
[1, 1, 1] | ok | [1, 2, 5, 4] | [4, 2, 5, 1]
[6, 7, 8] | ok | [1, 7, 8, 6] | [1, 6, 7, 8]
[10, 11, 12, 13, 14] | RuntimeError | [1, 7, 8, 6] | [1, 6, 7, 8]
"""
"""The LRU worker, 4 slots, 4 on the host: requested | result | slots | registered."""


@dataclass(frozen=True)
class Step:
    """One line of a manager's trace."""

    operation: str
    id: int
    result: bool | str
    slots: list[int | None]
    registered: list[int]
    active: list[int]
    pinned: tuple[list[int], list[int]]


@dataclass(frozen=True)
class WorkerStep:
    """One line of a worker's trace."""

    ids: list[int]
    result: str
    slots: list[int | None]
    registered: list[int]


def read_steps(trace: str) -> list[Step]:
    """Returns the lines of a manager's trace."""
    return [_read_step(line) for line in trace.splitlines()]


def read_worker_steps(trace: str) -> list[WorkerStep]:
    """Returns the lines of a worker's trace."""
    rows = [[cell.strip() for cell in line.split("|")] for line in trace.splitlines()]
    return [
        WorkerStep(
            ast.literal_eval(ids),
            result,
            ast.literal_eval(slots),
            ast.literal_eval(registered),
        )
        for ids, result, slots, registered in rows
    ]


def _read_step(line: str) -> Step:
    call, result, slots, registered, active, pins = (
        cell.strip() for cell in line.split("|")
    )
    operation, _, id = call.partition(" ")
    host, device = re.fullmatch(r"pins cpu (.*) gpu (.*)", pins).groups()
    return Step(
        operation,
        int(id or 0),
        {"True": True, "False": False}.get(result, result),
        ast.literal_eval(slots),
        ast.literal_eval(registered),
        ast.literal_eval(active),
        (ast.literal_eval(host), ast.literal_eval(device)),
    )
