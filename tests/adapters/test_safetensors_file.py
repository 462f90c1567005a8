"""The reader of safetensors files against sound and broken ones."""

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lora_jax.adapters.safetensors_file import DTYPES, read_safetensors
from lora_jax.errors import AdapterError

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def raw(path, header, data=b"\0" * 8, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length))
    with path.open("ab") as file:
        file.write(text + data)
    return path


def test_values_shapes_and_dtypes_are_those_of_the_package(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        f"{dtype}.{index}": np.array(rng.normal(size=shape) * 10, dtype)
        for dtype in ("float64", "float32", "float16", "int64", "uint8", "bool")
        for index, shape in enumerate([(), (3,), (2, 5), (0, 4), (1, 2, 3)])
    }
    arrays["bf16"] = rng.normal(size=(3, 3)).astype(ml_dtypes.bfloat16)
    save_file(arrays, tmp_path / "a.safetensors")
    found = read_safetensors(tmp_path / "a.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert not found[name].flags.writeable
        np.testing.assert_array_equal(found[name], array)


def test_a_header_may_end_in_spaces_and_carry_metadata(tmp_path):
    text = json.dumps({"__metadata__": {"format": "pt"}, "w": ENTRY}).encode() + b"   "
    assert read_safetensors(raw(tmp_path / "a", text))["w"].tolist() == [0.0, 0.0]


def twice(first, second):
    return f'{{"w": {json.dumps(first)}, "w": {json.dumps(second)}}}'.encode()


def entry(**fields):
    return {"w": ENTRY | fields}


HEADERS = [
    (twice(ENTRY, ENTRY), "'w': appears twice"),
    ({"w": ENTRY, "v": ENTRY}, "overlaps the one before"),
    (entry(data_offsets=[4, 12]), "leaves a gap"),
    (entry(data_offsets=[0, 7]), "needs 8 bytes"),
    (entry(data_offsets=[8, 0]), "needs 8 bytes"),
    (entry(data_offsets=[-8, 0]), "not lists of whole numbers"),
    (entry(data_offsets=[0]), "not lists of whole numbers"),
    (entry(shape=[3]), "needs 12 bytes"),
    (entry(shape=[-2]), "not lists of whole numbers"),
    (entry(shape=[True, 2]), "not lists of whole numbers"),
    (entry(shape=[2.0]), "not lists of whole numbers"),
    (entry(shape="2"), "not lists of whole numbers"),
    (entry(shape=[1] * 40), "not lists of whole numbers"),
    (entry(shape=[2**62, 2**62, 4]), "needs .* bytes"),
    (entry(shape=[2**70]), "not lists of whole numbers"),
    (entry(shape=[2**40], data_offsets=[0, 2**42]), "truncated"),
    (entry(dtype="F31"), "unknown dtype 'F31'"),
    (entry(dtype=7), "unknown dtype 7"),
    (entry(extra=1), "needs exactly dtype, shape and data_offsets"),
    ({"w": {"dtype": "F32"}}, "needs exactly"),
    ({"w": [1]}, "not a tensor entry"),
    ({"w": ENTRY, "__metadata__": {"a": 1}}, "__metadata__: not a mapping of texts"),
    ({"a\nb": ENTRY}, "printable"),
    ({"\ud800": ENTRY}, "printable"),
    ({"w" * 1001: ENTRY}, "printable"),
    ({}, "8 bytes after the data belong to no tensor"),
    ([], "not a JSON object"),
    (b"{", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("header", "text"), HEADERS, ids=range(len(HEADERS)))
def test_a_broken_header_is_refused_with_the_files_name(tmp_path, header, text):
    path = raw(tmp_path / "bad.safetensors", header)
    with pytest.raises(AdapterError, match=text) as caught:
        read_safetensors(path)
    assert "bad.safetensors" in str(caught.value)


LENGTHS = [(b"", "too short"), (b"\0" * 7, "too short")]


@pytest.mark.parametrize(("content", "text"), LENGTHS)
def test_a_file_shorter_than_its_length_field_is_refused(tmp_path, content, text):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(AdapterError, match=text):
        read_safetensors(tmp_path / "a")


@pytest.mark.parametrize("length", [10_000, 2**31, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path, length):
    with pytest.raises(AdapterError, match=f"header length {length} exceeds"):
        read_safetensors(raw(tmp_path / "a", {"w": ENTRY}, length=length))


def test_data_cut_by_one_byte_is_truncated(tmp_path):
    with pytest.raises(AdapterError, match="truncated"):
        read_safetensors(raw(tmp_path / "a", {"w": ENTRY}, b"\0" * 7))


def test_trailing_bytes_are_refused(tmp_path):
    with pytest.raises(AdapterError, match="1 bytes after the data"):
        read_safetensors(raw(tmp_path / "a", {"w": ENTRY}, b"\0" * 9))


def test_a_boolean_that_is_neither_is_refused(tmp_path):
    header = entry(dtype="BOOL", shape=[8])
    with pytest.raises(AdapterError, match="other than 0 and 1"):
        read_safetensors(raw(tmp_path / "a", header, b"\7" * 8))


def test_many_faults_are_told_at_once_and_counted(tmp_path):
    header = {
        f"w{i}": {"dtype": "?", "shape": [], "data_offsets": [0, 0]} for i in range(30)
    }
    with pytest.raises(AdapterError, match=r"(?s)w0.*w19.*and 11 more") as caught:
        read_safetensors(raw(tmp_path / "a", header))
    assert len(str(caught.value).splitlines()) == 22


def test_a_pipe_a_folder_and_nothing_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(AdapterError, match="not a regular file"):
        read_safetensors(tmp_path / "pipe")
    with pytest.raises(AdapterError, match="not a regular file"):
        read_safetensors(tmp_path)
    with pytest.raises(AdapterError, match="cannot be opened"):
        read_safetensors(tmp_path / "nothing")


def test_a_file_of_absurd_size_is_refused_unread(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**36)
    with pytest.raises(AdapterError, match="more than the"):
        read_safetensors(tmp_path / "sparse")


def test_the_table_covers_the_formats_dtypes():
    assert {dtype.itemsize for dtype in DTYPES.values()} == {1, 2, 4, 8}
