"""A torch `.bin` or `.pt` file -> NumPy arrays, with nothing executed.

The pickle in it is only described (`pickle_machine`); of the description, only records
that rebuild tensors from the archive's own data become arrays.

Source: the zip format of torch.save, `torch/serialization.py`, since torch 1.6.
"""

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from lora_jax.adapters.pickle_machine import Call, Name, Storage, run
from lora_jax.adapters.safetensors_file import MAX_NAME, Wanted, every, open_regular
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

BROKEN_ZIP = (
    zipfile.BadZipFile,
    EOFError,
    IndexError,
    KeyError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,  # encrypted
    struct.error,
)
"""What `zipfile` raises on mutated archives."""

CONVERT = (
    "convert it where it comes from and is trusted: "
    "safetensors.torch.save_file(torch.load(file), 'adapter_model.safetensors')"
)


def read_torch_file(path: Path, wanted: Wanted = every) -> dict[str, np.ndarray]:
    """Returns the wanted tensors of a file that torch.save wrote of a flat state dict.

    Raises:
      AdapterError: if the file is no zip of torch's, or its pickle holds anything but
        tensors by name; the text says how to convert the file.
    """
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return _read_archive(archive, wanted)
        except BROKEN_ZIP as error:
            text = f"{path}: is no zip file of torch.save: {error}; {CONVERT}"
            raise AdapterError(text) from error
        except ValueError as error:
            raise AdapterError(f"{path}: {error}; {CONVERT}") from error


def _read_archive(archive: zipfile.ZipFile, wanted: Wanted) -> dict[str, np.ndarray]:
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
        if wanted(_key(name))
    }


def _key(name: object) -> str:
    if isinstance(name, str) and name.isprintable() and len(name) <= MAX_NAME:
        return name
    raise ValueError(f"a key of the pickle is no tensor's name: {name!r:.80}")


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
