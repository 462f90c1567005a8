"""A torch `.bin` or `.pt` file -> NumPy arrays, with nothing executed.

A pickle is a program; unpickling runs it. Here its opcodes are walked by a small
machine of our own that imports nothing and calls nothing: a global becomes its name, a
call becomes a record of what would be called. Afterwards the records are looked at, and
only those that rebuild tensors from the archive's own data become arrays.

Source: the zip format of torch.save, `torch/serialization.py`, since torch 1.6.
"""

import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from lora_jax.adapters.safetensors_file import MAX_NAME, open_regular
from lora_jax.errors import AdapterError

MAX_PROGRAM_BYTES = 32 * 2**20
MAX_MEMBERS = 500_000

STORAGES: Mapping[str, np.dtype] = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}

CONVERT = (
    "convert it where it comes from and is trusted: "
    "safetensors.torch.save_file(torch.load(file), 'adapter_model.safetensors')"
)


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


def read_torch_file(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file that torch.save wrote of a flat state dict.

    Raises:
      AdapterError: if the file is no zip of torch's, or its pickle holds anything but
        tensors by name; the text says how to convert the file.
    """
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return _read_archive(archive)
        except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError) as error:
            text = f"{path}: is no zip file of torch.save: {error}; {CONVERT}"
            raise AdapterError(text) from error
        except ValueError as error:
            raise AdapterError(f"{path}: {error}; {CONVERT}") from error


def _read_archive(archive: zipfile.ZipFile) -> dict[str, np.ndarray]:
    members = archive.infolist()
    names = [member.filename for member in members]
    if len(members) > MAX_MEMBERS or len(set(names)) != len(names):
        raise ValueError("the archive has too many members, or one twice")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("the archive is compressed, which torch.save never does")
    programs = [name for name in names if name.rpartition("/")[2] == "data.pkl"]
    if len(programs) != 1:
        raise ValueError("the archive does not hold one data.pkl")
    root = programs[0].removesuffix("data.pkl")
    if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
        raise ValueError("the data are not little-endian")
    if archive.getinfo(programs[0]).file_size > MAX_PROGRAM_BYTES:
        raise ValueError(f"data.pkl exceeds {MAX_PROGRAM_BYTES} bytes")
    content = run(archive.read(programs[0]))
    if not isinstance(content, dict) or not content:
        raise ValueError("the pickle is not a dictionary of tensors")
    storages: dict[str, bytes] = {}
    return {
        _key(name): _to_array(value, archive, f"{root}data/", storages)
        for name, value in content.items()
    }


def _key(name: object) -> str:
    if isinstance(name, str) and name.isprintable() and len(name) <= MAX_NAME:
        return name
    raise ValueError(f"a key of the pickle is no tensor's name: {name!r:.80}")


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


def _to_array(
    value: object, archive: zipfile.ZipFile, root: str, storages: dict[str, bytes]
) -> np.ndarray:
    match value:
        case Call(Name("torch._utils._rebuild_parameter"), (data, *_)):
            return _to_array(data, archive, root, storages)
        case Call(
            Name("torch._utils._rebuild_tensor_v2"),
            (
                Storage(("storage", Name(kind), str(key), _, int())),
                int(offset),
                tuple(shape),
                tuple(strides),
                *_,
            ),
        ):
            dtype = STORAGES.get(kind.removeprefix("torch."))
            if dtype is None:
                raise ValueError(f"a tensor of type {kind} cannot be read")
            if key not in storages:
                storages[key] = _read_storage(archive, f"{root}{key}")
            return _strided(storages[key], dtype, offset, shape, strides)
    raise ValueError(f"the pickle holds {_shown(value)}, which is no plain tensor")


def _read_storage(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    except KeyError as error:
        raise ValueError(f"the archive lacks {name}") from error


def _strided(
    data: bytes, dtype: np.dtype, offset: int, shape: tuple, strides: tuple
) -> np.ndarray:
    """A copy of a tensor's values, never more than its storage has."""
    counts = (offset, *shape, *strides)
    whole = all(type(item) is int and 0 <= item < 2**48 for item in counts)
    if not whole or len(shape) != len(strides) or len(shape) > 8:
        raise ValueError(f"a tensor has shape {shape} and strides {strides}")
    storage = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
    size = int(np.prod([float(item) for item in shape]))
    reach = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if size and (size > storage.size or offset + reach >= storage.size):
        raise ValueError(f"a tensor of shape {shape} exceeds its storage")
    if not size:
        return _read_only(np.empty(shape, dtype))
    steps = tuple(step * dtype.itemsize for step in strides)
    view = np.lib.stride_tricks.as_strided(storage[offset:], shape, steps)
    return _read_only(np.array(view))


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def _shown(value: object) -> str:
    if isinstance(value, Call) and isinstance(value.function, Name):
        return f"a call of {value.function.path[:80]}"
    return f"a {type(value).__name__}"
