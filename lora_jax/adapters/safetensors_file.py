"""A safetensors file -> NumPy arrays, after its header has been checked here.

The `safetensors` package takes a header with duplicate keys (the last one wins), so
the header is parsed and proved before a byte of data is read: memory stays bounded by
the file's real size, whatever shapes it declares. Knows nothing of adapters.

Source: https://github.com/huggingface/safetensors#format.
"""

import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import ml_dtypes
import numpy as np

from lora_jax.errors import AdapterError, faults

MAX_HEADER_BYTES = 32 * 2**20
"""About 200 000 tensors; the largest expert adapters known need a fifth of it."""

MAX_FILE_BYTES = 32 * 2**30
"""An embedding and a head of a 70B model in float32 are 8.4 GiB."""

MAX_NAME = 1000
"""Characters of a tensor's name; real ones have about 100."""

MAX_FAULTS = 20
"""Faults told of one header; the rest are counted."""

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: `begin` and `end` count bytes from the file's start."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


Wanted = Callable[[str], bool]
"""Says of a tensor's name whether its values are to be read."""


def every(name: str) -> bool:
    """Wants every tensor."""
    return True


def read_safetensors(path: Path, wanted: Wanted = every) -> dict[str, np.ndarray]:
    """Returns the wanted tensors of the file as read-only arrays, by name.

    Of the others no byte is read; the header must be sound all the same.

    Raises:
      AdapterError: if it is no regular file, or its header and data disagree in any
        way; the text names the file and every fault.
    """
    with open_regular(path) as file:
        entries = read_header(file, path)
        return {
            name: read_entry(file, path, entry)
            for name, entry in entries.items()
            if wanted(name)
        }


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file to read; a pipe, device or folder is refused unread.

    Raises:
      AdapterError: if it cannot be opened, is no regular file, or is too large.
    """
    try:
        # A plain open() of a pipe waits for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path}: cannot be opened: {error}") from error
    state = os.fstat(descriptor)
    if stat.S_ISREG(state.st_mode) and state.st_size <= MAX_FILE_BYTES:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(state.st_mode):
        raise AdapterError(
            f"{path}: {state.st_size} bytes, more than the {MAX_FILE_BYTES} that an "
            "adapter's file may have."
        )
    raise AdapterError(f"{path}: is not a regular file; give the file itself.")


def read_header(file: BufferedReader, path: Path) -> dict[str, Entry]:
    """Returns where each tensor lies, having proved that the header is sound.

    Raises:
      AdapterError: naming the file and each fault.
    """
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise AdapterError(f"{path}: {size} bytes is too short for a safetensors file.")
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise AdapterError(
            f"{path}: header length {length} exceeds the file ({size} bytes) or the "
            f"limit ({MAX_HEADER_BYTES}); the file is truncated or no safetensors file."
        )
    pairs = _parse(file.read(length), path)
    found: list[str] = []
    entries: dict[str, Entry] = {}
    for name, value in pairs:
        _add_entry(entries, name, value, found)
    entries = _shift(entries, 8 + length)
    found += _offset_faults(entries, 8 + length, size)
    if found:
        raise AdapterError(faults(f"{path}: broken safetensors header:", _cut(found)))
    return entries


def _cut(found: list[str]) -> list[str]:
    hidden = len(found) - MAX_FAULTS
    return [*found[:MAX_FAULTS], f"... and {hidden} more"] if hidden > 0 else found


class _Pairs(list):
    """A JSON object as its (key, value) pairs, so that duplicates can be seen."""


def _parse(header: bytes, path: Path) -> _Pairs:
    try:
        pairs = json.loads(header.decode("utf-8"), object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: header is not JSON: {error}") from error
    if not isinstance(pairs, _Pairs):
        raise AdapterError(f"{path}: header is not a JSON object.")
    return pairs


def _add_entry(
    entries: dict[str, Entry], name: str, value: object, found: list[str]
) -> None:
    if name == "__metadata__":
        if not isinstance(value, _Pairs) or not all(
            isinstance(v, str) for _, v in value
        ):
            found.append("__metadata__: not a mapping of texts")
    elif not name.isprintable() or len(name) > MAX_NAME:
        found.append(f"{ascii(name)[:80]}: not printable, or longer than {MAX_NAME}")
    elif name in entries:
        found.append(f"{name!r}: appears twice")
    elif isinstance(value, _Pairs):
        entry = _read_fields(name, value, found)
        if entry is not None:
            entries[name] = entry
    else:
        found.append(f"{name!r}: not a tensor entry")


def _read_fields(name: str, value: _Pairs, found: list[str]) -> Entry | None:
    fields = dict(value)
    if len(value) != 3 or fields.keys() != {"dtype", "shape", "data_offsets"}:
        found.append(f"{name!r}: needs exactly dtype, shape and data_offsets")
        return None
    shape, offsets = fields["shape"], fields["data_offsets"]
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        found.append(f"{name!r}: unknown dtype {fields['dtype']!r}")
    elif not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        found.append(f"{name!r}: shape or data_offsets are not lists of whole numbers")
    elif math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        found.append(
            f"{name!r}: {dtype} of shape {_short(shape)} needs "
            f"{math.prod(shape) * dtype.itemsize} bytes, data_offsets {offsets} hold "
            f"{offsets[1] - offsets[0]}"
        )
    else:
        return Entry(dtype, tuple(shape), offsets[0], offsets[1])
    return None


def _is_counts(value: object) -> bool:
    """Whether `value` is a short list of whole numbers in [0, 2**63)."""
    return (
        isinstance(value, list)
        and not isinstance(value, _Pairs)
        and len(value) <= 32
        and all(type(item) is int and 0 <= item < 2**63 for item in value)
    )


def _short(shape: object) -> str:
    text = str(shape)
    return text if len(text) <= 80 else text[:77] + "..."


def _shift(entries: dict[str, Entry], start: int) -> dict[str, Entry]:
    return {
        name: Entry(e.dtype, e.shape, e.begin + start, e.end + start)
        for name, e in entries.items()
    }


def _offset_faults(entries: dict[str, Entry], start: int, size: int) -> list[str]:
    """Tensors must cover the data without gap, overlap, or bytes left over."""
    found = []
    position = start
    ordered = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
    for name, entry in ordered:
        if entry.begin != position:
            what = (
                "overlaps the one before" if entry.begin < position else "leaves a gap"
            )
            found.append(f"{name!r}: data begins at {entry.begin}, {what} ({position})")
        position = max(position, entry.end)
    if position > size:
        found.append(f"data ends at byte {position}, the file at {size}: truncated")
    elif position < size:
        found.append(f"{size - position} bytes after the data belong to no tensor")
    return found


def read_entry(file: BufferedReader, path: Path, entry: Entry) -> np.ndarray:
    """Returns the values of one tensor of an opened file, read-only.

    Raises:
      AdapterError: if the file ends too soon, or a BOOL is neither 0 nor 1.
    """
    data = np.empty(entry.end - entry.begin, np.uint8)
    file.seek(entry.begin)
    if file.readinto(data.data) != data.size:
        raise AdapterError(
            f"{path}: ended while it was being read; is it being written?"
        )
    array = data.view(entry.dtype).reshape(entry.shape)
    if entry.dtype == np.bool_ and data.size and data.max() > 1:
        raise AdapterError(f"{path}: a BOOL tensor holds bytes other than 0 and 1.")
    array.setflags(write=False)
    return array
