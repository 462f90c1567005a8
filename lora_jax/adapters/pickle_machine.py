"""A pickle -> what it describes, with nothing imported and nothing called.

A pickle is a program; unpickling runs it. Here its opcodes are walked by a small
machine: a global becomes its name, a call becomes a record of what would be called.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """What the pickle would import, not imported."""

    path: str


@dataclass(frozen=True, eq=False)
class Call:
    """What the pickle would call, not called."""

    function: object
    arguments: object


@dataclass(frozen=True, eq=False)
class Storage:
    """A reference to one of the archive's data files."""

    reference: object


class _Mark:
    """A place on the stack."""


def run(program: bytes) -> object:
    """Returns what a pickle describes, with names and calls as records.

    Raises:
      ValueError: at an opcode that a state dict of tensors does not need.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(program):
            step = OPCODES.get(opcode.name)
            if step is None:
                raise ValueError(
                    f"the pickle uses {opcode.name}, a state dict does not"
                )
            step(machine, argument)
        return machine.stack.pop()
    except (IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the pickle is broken: {error!r}") from error


class _Machine:
    """The stack and memo of one walk."""

    def __init__(self) -> None:
        self.stack: list = []
        self.memo: dict[int, object] = {}

    def to_mark(self) -> list:
        items: list = []
        while not isinstance(top := self.stack.pop(), _Mark):
            items.append(top)
        return items[::-1]

    def fold(self, count: int) -> None:
        items = [self.stack.pop() for _ in range(count)]
        self.stack.append(tuple(items[::-1]))

    def name(self, argument: str) -> None:
        self.stack.append(Name(argument.replace(" ", ".")))

    def stack_name(self) -> None:
        last, module = self.stack.pop(), self.stack.pop()
        self.stack.append(Name(f"{module}.{last}"))

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if function == Name("collections.OrderedDict"):
            self.stack.append(dict(*arguments))
        else:
            self.stack.append(Call(function, arguments))

    def persistent(self) -> None:
        self.stack.append(Storage(self.stack.pop()))

    def set_items(self, items: list) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise TypeError("items are set on what is no dictionary")
        target.update(zip(items[::2], items[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def append(self, items: list) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise TypeError("items are appended to what is no list")
        target.extend(items)


Step = Callable[[_Machine, object], object]


def _push(machine: _Machine, value: object) -> None:
    machine.stack.append(value)


def _put(machine: _Machine, index: object) -> None:
    machine.memo[int(str(index))] = machine.stack[-1]


def _get(machine: _Machine, index: object) -> None:
    machine.stack.append(machine.memo[int(str(index))])


OPCODES: Mapping[str, Step] = {
    "PROTO": lambda m, a: None,
    "FRAME": lambda m, a: None,
    "STOP": lambda m, a: None,
    "MARK": lambda m, a: _push(m, _Mark()),
    "NONE": lambda m, a: _push(m, None),
    "NEWTRUE": lambda m, a: _push(m, True),
    "NEWFALSE": lambda m, a: _push(m, False),
    "EMPTY_DICT": lambda m, a: _push(m, {}),
    "EMPTY_LIST": lambda m, a: _push(m, []),
    "EMPTY_TUPLE": lambda m, a: _push(m, ()),
    "TUPLE": lambda m, a: _push(m, tuple(m.to_mark())),
    "TUPLE1": lambda m, a: m.fold(1),
    "TUPLE2": lambda m, a: m.fold(2),
    "TUPLE3": lambda m, a: m.fold(3),
    "GLOBAL": lambda m, a: m.name(str(a)),
    "STACK_GLOBAL": lambda m, a: m.stack_name(),
    "REDUCE": lambda m, a: m.call(),
    # The state of an OrderedDict is its `_metadata`: versions of modules, of no use.
    "BUILD": lambda m, a: m.stack.pop(),
    "BINPERSID": lambda m, a: m.persistent(),
    "SETITEM": lambda m, a: m.set_item(),
    "SETITEMS": lambda m, a: m.set_items(m.to_mark()),
    "APPEND": lambda m, a: m.append([m.stack.pop()]),
    "APPENDS": lambda m, a: m.append(m.to_mark()),
    "MEMOIZE": lambda m, a: _put(m, len(m.memo)),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "PUT"), _put),
    **dict.fromkeys(("BINGET", "LONG_BINGET", "GET"), _get),
    **dict.fromkeys(
        ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"),
        _push,
    ),
}
"""Opcode -> its step; a pickle with any other is refused."""
