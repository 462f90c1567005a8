"""Torch files are read without running them, or refused with advice."""

import pickle
import zipfile
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest

from adapter_files import Q, config, pair, write
from lora_jax.adapters import load_adapter
from lora_jax.adapters.pickle_file import read_torch_file
from lora_jax.errors import AdapterError


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


def archive(path, program, members=(), compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", program)
        for name, data in members:
            file.writestr(f"archive/{name}", data)
    return path


@pytest.mark.parametrize("protocol", range(6))
def test_a_payload_is_never_run(tmp_path, protocol):
    program = pickle.dumps({"w": Evil(tmp_path / "marker")}, protocol)
    with pytest.raises(
        AdapterError, match=r"no plain tensor|the pickle uses|is broken"
    ):
        read_torch_file(archive(tmp_path / "a.bin", program))
    (tmp_path / "b.bin").write_bytes(program)
    with pytest.raises(AdapterError, match=r"no zip file of torch\.save"):
        read_torch_file(tmp_path / "b.bin")
    assert not (tmp_path / "marker").exists()


def test_the_message_names_what_would_be_called_and_how_to_convert(tmp_path):
    program = pickle.dumps({"w": Evil(tmp_path / "marker")}, 2)
    with pytest.raises(AdapterError, match=r"a call of \w+\.open.*save_file"):
        read_torch_file(archive(tmp_path / "a.bin", program))


PROGRAMS = [
    (b"", "is broken|pickle exhausted"),
    (b"garbage", "convert it where"),
    (pickle.dumps([1], 2), "not a dictionary of tensors"),
    (pickle.dumps({}, 2), "not a dictionary of tensors"),
    (pickle.dumps({"w": 1.5}, 2), "uses BINFLOAT"),
    (pickle.dumps({"w": 1}, 2), "a int, which is no plain tensor"),
    (pickle.dumps({"w": {"v": 1}}, 2), "a dict, which is no plain tensor"),
    (pickle.dumps({3: 1}, 2), "no tensor's name"),
    (pickle.dumps({"a\n": 1}, 2), "no tensor's name"),
    (b"\x80\x02}q\x00(X\x01\x00\x00\x00wR.", "not a dictionary"),
    (b"\x80\x02h\x05.", "is broken"),
    (b"\x80\x02(.", "not a dictionary"),
    (b"\x80\x02NN0u.", "uses POP"),
    (b"\x80\x02N]s.", "is broken"),
    (b"\x80\x02}Na.", "is broken"),
]


@pytest.mark.parametrize(("program", "text"), PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_pickle_of_anything_else_is_refused(tmp_path, program, text):
    with pytest.raises(AdapterError, match=text):
        read_torch_file(archive(tmp_path / "a.bin", program))


def test_an_archive_that_torch_would_not_write_is_refused(tmp_path):
    program = pickle.dumps(OrderedDict(), 2)
    cases = {
        "is compressed": {"compression": zipfile.ZIP_DEFLATED},
        "one data.pkl": {"members": [("inner/data.pkl", program)]},
        "not little-endian": {"members": [("byteorder", "big")]},
    }
    for text, options in cases.items():
        with pytest.raises(AdapterError, match=text):
            read_torch_file(archive(tmp_path / "a.bin", program, **options))


def test_an_encrypted_archive_is_refused(tmp_path):
    path = archive(tmp_path / "a.bin", tensor_program())
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # in the directory
    path.write_bytes(data)
    with pytest.raises(AdapterError, match="encrypted"):
        read_torch_file(path)


def tensor_program(kind="FloatStorage", offset=0, shape=(2, 3), strides=(3, 1)):
    """Writes a state dict's pickle by hand, so that its numbers can be wrong."""

    def number(value):
        return b"J" + int(value).to_bytes(4, "little", signed=True)

    def numbers(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    def text(value):
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode()
    storage += text("0") + text("cpu") + number(6) + b"tQ"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset)
    call += numbers(shape) + numbers(strides) + b"\x89}tR"
    return b"\x80\x02}" + text("w") + call + b"s."


VALUES = np.arange(6, dtype=np.float32).tobytes()


def read_by_hand(tmp_path, data=VALUES, **numbers):
    members = [("data/0", data)]
    path = archive(tmp_path / "a.bin", tensor_program(**numbers), members)
    return read_torch_file(path)["w"]


def test_strides_and_offsets_are_followed(tmp_path):
    assert read_by_hand(tmp_path).tolist() == [[0, 1, 2], [3, 4, 5]]
    turned = read_by_hand(tmp_path, shape=(3, 2), strides=(1, 3))
    assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert read_by_hand(tmp_path, offset=4, shape=(2,), strides=(1,)).tolist() == [4, 5]
    assert read_by_hand(tmp_path, shape=(0, 3)).shape == (0, 3)
    assert not turned.flags.writeable


NUMBERS = [
    ({"shape": (3, 3)}, "exceeds its storage"),
    ({"offset": 1}, "exceeds its storage"),
    ({"strides": (4, 1)}, "exceeds its storage"),
    ({"shape": (2**30, 2**30), "strides": (0, 0)}, "exceeds its storage"),
    ({"strides": (-3, 1)}, "strides"),
    ({"offset": -1}, "strides"),
    ({"shape": (6,)}, "strides"),
    ({"kind": "QInt8Storage"}, "QInt8Storage cannot be read"),
    ({"data": b"\0" * 7}, "exceeds its storage"),
]


@pytest.mark.parametrize(("numbers", "text"), NUMBERS, ids=range(len(NUMBERS)))
def test_numbers_that_do_not_fit_the_storage_are_refused(tmp_path, numbers, text):
    with pytest.raises(AdapterError, match=text):
        read_by_hand(tmp_path, **numbers)


def test_a_storage_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(AdapterError, match="the archive lacks archive/data/0"):
        read_torch_file(archive(tmp_path / "a.bin", tensor_program()))


@pytest.mark.torch
@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_what_torch_saves_is_read(tmp_path, name):
    import torch

    tensors = pair(Q, 4)
    write(tmp_path, tensors, config())
    (tmp_path / "adapter_model.safetensors").unlink()
    state = OrderedDict((key, torch.tensor(array)) for key, array in tensors.items())
    state._metadata = {"": {"version": 1}}
    first = next(iter(state))
    state[first] = torch.nn.Parameter(state[first])
    torch.save(state, tmp_path / name)
    part = load_adapter(tmp_path).parts[Q]
    for found, expected in zip((part.a, part.b), tensors.values(), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.torch
def test_every_dtype_view_and_shared_storage_is_read(tmp_path):
    import torch

    whole = torch.randn(6, 8)
    state = {"row": whole[2], "turned": whole.T, "part": whole[1:3, ::2]}
    kinds = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split()
    state |= {kind: (whole * 3).to(getattr(torch, kind)) for kind in kinds}
    torch.save(state, tmp_path / "a.pt")
    found = read_torch_file(tmp_path / "a.pt")
    for name, tensor in state.items():
        if tensor.dtype is torch.bfloat16:
            assert found[name].dtype == np.dtype(ml_dtypes.bfloat16)
            tensor, found[name] = tensor.float(), found[name].astype(np.float32)
        np.testing.assert_array_equal(found[name], tensor.numpy())
