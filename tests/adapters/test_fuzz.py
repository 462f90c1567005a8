"""Mutated files are read or refused: no other exception, no hang, no flood."""

import json
import random
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from adapter_files import Q, config, normal, pair, write
from lora_jax.adapters import adapter_from_tensors, load_adapter
from lora_jax.adapters.fields import RULES
from lora_jax.adapters.pickle_file import read_torch_file
from lora_jax.errors import AdapterError

MUTANTS = 700
"""Of each kind in a default run; tens of thousands were run by hand."""

VALUES = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, 1.5, 1e308, -0.0),
    *("", "F32", "BF16", "F8_E4M3", "I64", "x" * 3000, "\ud800", "../x", "LORA"),
    *([], {}, [0], [0, 8], [4, 32], [2**40, 2**40], [[1]], {"a": 1}, [True], "(a|a)*b"),
]


def mutate_json(rng: random.Random, value: object) -> object:
    """Returns a JSON value with one place changed, dropped, doubled or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(4):
            case 0:
                del changed[key]
            case 1:
                changed[rng.choice([key + "x", key[:-1], key.upper(), ""])] = value[key]
            case _:
                changed[key] = mutate_json(rng, value[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], mutate_json(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 4, -4, 2**32])
    return rng.choice(VALUES)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Returns bytes cut, extended, or with a few changed."""
    if rng.random() < 0.3:
        return data[: rng.randrange(len(data) + 1)] + rng.randbytes(
            rng.randrange(3) * 4
        )
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        # The first bytes decide most.
        at = rng.randrange(len(data) if rng.random() < 0.5 else min(64, len(data)))
        changed[at] = rng.randrange(256)
    return bytes(changed)


def mutate_header(rng: random.Random, data: bytes) -> bytes:
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    for _ in range(rng.randint(1, 2)):
        header = mutate_json(rng, header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def attempt(read) -> bool:
    """Whether it was read; anything but an adapter or an AdapterError goes up."""
    message = ""
    try:
        read()
    except AdapterError as error:
        message = str(error)
    assert len(message) < 50_000
    return not message


def fuzz_folder(folder: Path, seed: int, count: int) -> int:
    """Reads mutants of a folder's two files; returns how many were sound."""
    rng = random.Random(seed)
    fields = config(rank_pattern={"q_proj": 4}, target_modules=["q_proj"], bias="none")
    head = {"base_model.model.lm_head.weight": normal(np.random.default_rng(0), 9, 32)}
    write(folder, pair(Q, 4) | head, fields)
    weights, settings = (
        folder / "adapter_model.safetensors",
        folder / "adapter_config.json",
    )
    good, good_fields = weights.read_bytes(), settings.read_text()
    sound = 0
    for _ in range(count):
        what = rng.randrange(3)
        weights.write_bytes(
            [good, mutate_header(rng, good), mutate_bytes(rng, good)][what]
        )
        changed = mutate_json(rng, fields) if what == 0 else fields
        settings.write_text(json.dumps(changed))
        sound += attempt(lambda: load_adapter(folder))
    assert good_fields
    return sound


@pytest.mark.parametrize("seed", range(3))
def test_mutated_folders_are_read_or_refused(tmp_path, seed):
    sound = fuzz_folder(tmp_path / "a", seed, MUTANTS)
    assert 0 < sound < MUTANTS


def fuzz_torch(path: Path, seed: int, program: bytes, count: int) -> int:
    """Reads mutants of a torch file; returns how many were sound."""
    rng = random.Random(seed)
    sound = 0
    for turn in range(count):
        whole = turn % 4 == 0
        with zipfile.ZipFile(path, "w") as file:
            inner = program if whole else mutate_bytes(rng, program)
            file.writestr("archive/data.pkl", inner)
            file.writestr("archive/data/0", bytes(24))
        if whole:
            path.write_bytes(mutate_bytes(rng, path.read_bytes()))
        sound += attempt(lambda: read_torch_file(path))
    return sound


PROGRAM = (
    b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n"
    b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpuK\x06tQK\x00K\x02K\x03\x86K\x03K\x01\x86\x89}tRs."
)


def test_mutated_torch_files_are_read_or_refused(tmp_path):
    sound = fuzz_torch(tmp_path / "a.bin", 0, PROGRAM, MUTANTS)
    assert 0 < sound < MUTANTS


NAMES = [
    *(f"{Q}.lora_a", f"{Q}.lora_b", f"{Q}.m", "model.embed_tokens.lora_a"),
    *("layers.0.attn.q_proj.lora_a.weight", "layers.0.attn.q_proj.lora_b.weight"),
    *("layers.0.attn.q_proj.magnitude", "output.lora_a.weight"),
    *(f"{Q}.lora_down.weight", f"{Q}.lora_up.weight", f"{Q}.alpha"),
    *("layers.0.attn.q_proj.w_lora_a", "layers.0.attn.q_proj.w_lora_b"),
    *(f"{Q}.lora_A.weight", f"{Q}.lora_B.weight", f"{Q}.lora_B.bias", f"{Q}.bias"),
    *(f"{Q}.lora_magnitude_vector", f"{Q}.base_layer.bias", f"{Q}.weight"),
    *("a.experts.lora_A.weight", "a.experts.lora_B.weight", "score.weight"),
    *("e.lora_embedding_A", "e.lora_embedding_B", "e.base_layer.weight"),
    *("e.token_adapter.trainable_tokens_delta", "s.modules_to_save.weight"),
]
SHAPES = [(), (0,), (4,), (32,), (1, 4), (4, 32), (32, 4), (4, 4, 8), (8, 4), (0, 4)]
DTYPES = ["float32", "float32", "float16", "float64", "int64", "bool"]


def random_adapter(rng: random.Random):
    """Returns a few tensors of any names and shapes, and a config of any fields."""
    count = rng.randint(0, 5)
    chosen = rng.choices(NAMES, k=count)
    tensors = {
        name: np.full(rng.choice(SHAPES), rng.choice([1, 2, 7]), rng.choice(DTYPES))
        for name in chosen
    }
    fields = {name: rng.choice(VALUES) for name in rng.sample(sorted(RULES), 3)}
    extra = {"rank": 4, "alpha": 8, "lora_parameters": {"scale": 2}} | fields
    base = {"num_attention_heads": rng.choice(VALUES), "model_type": rng.choice(VALUES)}
    return tensors, config(**(extra if rng.random() < 0.7 else {})), base


def fuzz_tensors(seed: int, count: int) -> int:
    """Builds adapters of any tensors; returns how many were sound."""
    rng = random.Random(seed)
    sound = 0
    for _ in range(count):
        tensors, fields, base = random_adapter(rng)
        sound += attempt(
            lambda t=tensors, f=fields, b=base: adapter_from_tensors(
                t, f, name="a", base_config=b
            )
        )
    return sound


def test_tensors_of_any_name_and_shape_are_an_adapter_or_refused():
    assert 0 < fuzz_tensors(0, MUTANTS) < MUTANTS
