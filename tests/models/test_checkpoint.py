"""Safetensors files: what is read, and that a broken one is refused before any use."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lora_jax.errors import ModelError
from lora_jax.models.checkpoint import list_tensors

WEIGHTS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "c": np.zeros((0, 2), np.float16),
    "d": np.array(3, np.float16),
}


def test_tensors_are_read_as_they_were_saved(tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = list_tensors(tmp_path)
    assert found.keys() == WEIGHTS.keys()
    for name, expected in WEIGHTS.items():
        value = found[name].read()
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)


def header(**entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "empty": (b"", "cut off, 0 bytes are no safetensors header"),
    "cut header": (header(a=F32)[:20], "its header of 61 bytes is incomplete"),
    "huge header": (b"\xff" * 16, "is incomplete"),
    "no JSON": (b"\x03" + b"\0" * 7 + b"{ab", "Expecting property name"),
    "no UTF-8": (b"\x01" + b"\0" * 7 + b"\xff", "can't decode byte"),
    "cut data": (header(a=F32) + b"\0" * 7, "cut off or padded, 76 bytes"),
    "trailing": (header(a=F32) + b"\0" * 9, "cut off or padded, 78 bytes"),
    "overlap": (
        header(a=F32, b={**F32, "data_offsets": [4, 12]}) + b"\0" * 12,
        "tensor b does not begin where the one before ends",
    ),
    "size": (header(a={**F32, "shape": [3]}) + b"\0" * 8, "tensor a has 8 bytes, not"),
    "no offsets": (header(a={"dtype": "F32"}), "malformed header entry"),
    "no shape": (header(a={**F32, "shape": None}) + b"\0" * 8, "tensor a has no shape"),
    "no object": (header(a=3), "malformed header entry"),
    "no table": (b"\x02" + b"\0" * 7 + b"[]", "its header is no JSON object"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(tmp_path, case):
    content, text = BROKEN[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=text):
        list_tensors(tmp_path)


def test_a_folder_without_weights_says_what_it_needs(tmp_path):
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor"):
        list_tensors(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="is not a safetensors index"):
        list_tensors(tmp_path)


def test_every_missing_shard_and_double_tensor_is_named(tmp_path):
    index = {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index})
    )
    for file in ("1.safetensors", "3.safetensors"):
        save_file({"a": WEIGHTS["a"]}, tmp_path / file)
    with pytest.raises(ModelError) as error:
        list_tensors(tmp_path)
    assert "2.safetensors: missing, although" in str(error.value)
    assert "a: in both 1.safetensors and 3.safetensors" in str(error.value)
