"""Every fault of an adapter, by name, and all of them at once."""

import os

import ml_dtypes
import numpy as np
import pytest

from adapter_files import PREFIX, Q, V, config, normal, pair, pairs, write
from lora_jax.adapters import adapter_from_tensors, load_adapter
from lora_jax.adapters import config as adapter_config
from lora_jax.adapters.patterns import Budget
from lora_jax.errors import AdapterError

A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"
RNG = np.random.default_rng(0)


def refused(tensors, fields=None, **options):
    with pytest.raises(AdapterError) as caught:
        adapter_from_tensors(tensors, fields or config(), name="sql", **options)
    headline, *lines = str(caught.value).splitlines()
    assert headline == "adapter 'sql' (tensors in memory) cannot be read:"
    return "\n".join(lines)


def with_array(name, array):
    return pairs() | {name: array}


def with_value(value, dtype="float32"):
    array = pairs()[A].astype(dtype)
    array[1, 2] = value
    return with_array(A, array)


def without(name):
    return {key: array for key, array in pairs().items() if key != name}


TENSORS = [
    (without(B), [Q, "lora_B is missing; found only", A]),
    (without(A), [Q, "lora_A is missing; found only", B]),
    (with_array(A, normal(RNG, 8, 32)), [Q, "rank 8 of lora_A", "rank 4 of lora_B"]),
    (with_array(B, normal(RNG, 32)), [B, "shape (32,)", "two axes"]),
    (with_array(A, normal(RNG, 4, 8, 4)), [A, "shape (4, 8, 4)"]),
    (with_array(A, normal(RNG, 0, 32)), [A, "none of them empty"]),
    (with_array(A, normal(RNG, 4, 32).astype(np.int64)), [A, "int64", "convert"]),
    (with_array(A, normal(RNG, 4, 32) > 0), [A, "is bool"]),
    (with_value(np.nan), [A, "1 of 128 values"]),
    (with_value(np.inf), [A, "1 of 128 values", "allow_nonfinite"]),
    (with_value(-np.inf, "float16"), [A, "NaN"]),
    (with_value(np.nan, ml_dtypes.bfloat16), [A, "NaN"]),
    (
        pairs() | {"model.embed.what": normal(RNG, 2)},
        ["1 of 7 tensors", "model.embed.what", "known would be", A],
    ),
    ({"x.y": normal(RNG, 2)}, ["1 of 1", "base_model.model.model.layers.0"]),
    (pairs() | pair(Q, 4, prefix=""), ["two spellings of one"]),
    (pairs() | pair(Q.removeprefix("model."), 4), ["two spellings of one"]),
    (
        pair(Q, 4) | {n.replace(".w", ".b.w"): a for n, a in pair(V, 4).items()},
        ["several adapters: ['', 'b']"],
    ),
    ({}, ["no LoRA tensor"]),
]


@pytest.mark.parametrize(("tensors", "texts"), TENSORS, ids=range(len(TENSORS)))
def test_a_fault_of_the_tensors_is_named(tensors, texts):
    message = refused(tensors)
    assert len(message.splitlines()) <= 2
    for text in texts:
        assert text in message


def test_a_declared_rank_that_is_not_the_tensors_is_refused():
    assert "rank 4, the config declares 8" in refused(pairs(), config(r=8))
    message = refused(pairs(), config(rank_pattern={"q_proj": 2}))
    assert f"{Q}: the tensors have rank 4, the config declares 2" in message


def test_a_rank_above_the_limit_names_rank_limit_and_option():
    message = refused(pairs(), max_lora_rank=2)
    assert message.count("rank 4 exceeds max_lora_rank=2; raise max_lora_rank") == 3


def test_every_fault_is_told_at_once():
    tensors = with_value(np.nan) | {"foo": normal(RNG, 2)}
    del tensors[f"{PREFIX}{V}.lora_B.weight"]
    message = refused(tensors, config(peft_type="IA3", use_qalora=True))
    for text in ("IA3", "QALoRA", "NaN", "foo"):
        assert text in message


def test_faults_beyond_what_can_be_read_are_counted():
    modules = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(80)]
    message = refused(pairs(modules), max_lora_rank=2)
    assert len(message.splitlines()) == 51
    assert message.endswith("... and 30 more")


def test_nonfinite_values_pass_when_allowed():
    adapter = adapter_from_tensors(
        with_value(np.nan), config(), name="a", allow_nonfinite=True
    )
    assert np.isnan(adapter.parts[Q].a).sum() == 1


def test_a_catastrophic_pattern_ends_soon(monkeypatch):
    monkeypatch.setattr(adapter_config, "Budget", lambda: Budget(10_000))
    nested = "(?=.*" * 8 + "x" + ")" * 8
    message = refused(pairs(["a" * 300]), config(rank_pattern={nested: 4}))
    assert "takes more than" in message


def test_a_pattern_that_would_hang_matches_nothing():
    adapter = adapter_from_tensors(
        pairs(["a" * 300]), config(rank_pattern={"(a|a)*b": 9}), name="a"
    )
    assert adapter.rank == 4


CONFIGS = [
    (b"", "is not JSON"),
    (b"{", "is not JSON"),
    (b"[]", "is not a JSON object"),
    (b'{"r": 4, "r": 8}', "is not JSON: keys appear twice: r"),
    (b"\xff", "is not JSON"),
    (b"[" * 100_000, "is not JSON"),
    (b'{"a": "' + b"x" * 2**22 + b'"}', "more than 4194304 bytes"),
]


@pytest.mark.parametrize(("content", "text"), CONFIGS, ids=range(len(CONFIGS)))
def test_a_broken_config_file_is_refused(tmp_path, content, text):
    write(tmp_path, pairs())
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(AdapterError, match=rf"adapter_config\.json: {text}"):
        load_adapter(tmp_path)


def test_a_pipe_as_config_is_refused_at_once(tmp_path):
    write(tmp_path, pairs())
    (tmp_path / "adapter_config.json").unlink()
    os.mkfifo(tmp_path / "adapter_config.json")
    with pytest.raises(AdapterError, match="not a regular file"):
        load_adapter(tmp_path)


def test_a_truncated_file_is_refused_with_its_name(tmp_path):
    file = write(tmp_path, pairs()) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        AdapterError, match=r"adapter_model\.safetensors.*(?s:.)*truncated"
    ):
        load_adapter(tmp_path)
