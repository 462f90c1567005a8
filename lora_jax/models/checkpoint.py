"""Safetensors files of a folder seen as one table of tensors, read one at a time.

Knows the file format and nothing of models. A folder holds `model.safetensors`, or
shards listed in `model.safetensors.index.json`.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from lora_jax.errors import ModelError, faults

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of the weight files in a Hugging Face folder."""

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes of weights that can be loaded."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; a larger length means that the file is another format."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes:
      file: the safetensors file.
      dtype: the format's name, such as `"BF16"`.
      shape: as stored.
      begin, end: byte range in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(self) -> np.ndarray:
        """Returns the tensor as a read-only view of the mapped file."""
        count = int(np.prod(self.shape))
        if count == 0:
            return np.zeros(self.shape, DTYPES[self.dtype])
        flat = np.memmap(
            self.file, DTYPES[self.dtype], mode="r", offset=self.begin, shape=(count,)
        )
        return flat.reshape(self.shape)


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns every tensor of the folder's weight files by name.

    Raises:
      ModelError: if there are no weights, a shard is missing, a file is cut off or
        malformed, or two files hold the same name; the text names every fault.
    """
    found: dict[str, StoredTensor] = {}
    wrong: list[str] = []
    for file in _weight_files(folder):
        if not file.is_file():
            wrong.append(f"{file.name}: missing, although {INDEX} lists it")
            continue
        try:
            tensors = list(_read_header(file))
        except ValueError as error:
            wrong.append(f"{file.name}: {error}; download or save it again")
            continue
        for name, tensor in tensors:
            if name in found:
                wrong.append(f"{name}: in both {found[name].file.name} and {file.name}")
            found[name] = tensor
    if wrong:
        raise ModelError(faults(f"weights in {folder} cannot be read:", wrong))
    return found


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / name for name in sorted(set(names))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{index} is not a safetensors index: {error!r}"
            ) from error
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise ModelError(
        f"{folder} has neither {SINGLE} nor {INDEX}; weights in other formats "
        "(pytorch_model.bin) must be saved again with safe_serialization=True"
    )


def _read_header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Gives the tensors of one file, or raises `ValueError` saying what is broken.

    Source: https://github.com/huggingface/safetensors (format: an 8-byte little-endian
    header length, a JSON header, then the tensors without gaps).
    """
    size = file.stat().st_size
    if size < 8:
        raise ValueError(f"cut off, {size} bytes are no safetensors header")
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"cut off, its header of {length} bytes is incomplete")
        header = json.loads(stream.read(length).decode("utf-8"))
    data = 8 + length
    reached = data
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: _offsets(item[1])):
        begin, end = _offsets(entry)
        if data + begin != reached:
            raise ValueError(f"tensor {name} does not begin where the one before ends")
        reached = data + end
        yield name, _stored(file, name, entry, data)
    if reached != size:
        raise ValueError(f"cut off or padded, {size} bytes, its header says {reached}")


def _offsets(entry: object) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or [type(x) for x in offsets] != [int, int]:
        raise ValueError(f"malformed header entry {entry!r}")
    return offsets[0], offsets[1]


def _stored(
    file: Path, name: str, entry: Mapping[str, object], data: int
) -> StoredTensor:
    begin, end = _offsets(entry)
    dtype, shape = str(entry.get("dtype")), entry.get("shape")
    if not isinstance(shape, list):
        raise ValueError(f"tensor {name} has no shape")
    if dtype in DTYPES and int(np.prod(shape)) * DTYPES[dtype].itemsize != end - begin:
        raise ValueError(
            f"tensor {name} has {end - begin} bytes, not what {shape} needs"
        )
    return StoredTensor(file, dtype, tuple(shape), data + begin, data + end)
