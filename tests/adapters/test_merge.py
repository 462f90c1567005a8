"""Merged weights against a few lines of float64, and the folder that they lie in."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adapter_files import INNER, UP, WIDTH, Q, config, normal, pair
from lora_jax.adapters import Adapter, adapter_from_tensors, merge_adapters
from lora_jax.errors import AdapterError, ModelError

RNG = np.random.default_rng(4)
EMBED, HEAD, NORM = "model.embed_tokens", "lm_head", "model.norm"
BASE = {
    f"{EMBED}.weight": normal(RNG, 100, WIDTH),
    f"{Q}.weight": normal(RNG, WIDTH, WIDTH),
    f"{Q}.bias": normal(RNG, WIDTH),
    f"{UP}.weight": normal(RNG, INNER, WIDTH),
    f"{NORM}.weight": normal(RNG, WIDTH),
}


def write_base(folder, tensors=None, *, tied=True, shards=1, **fields):
    folder.mkdir()
    tensors = BASE if tensors is None else tensors
    settings = {"model_type": "llama", "vocab_size": 100, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(settings | fields))
    (folder / "tokenizer.json").write_text("{}")
    names = sorted(tensors)
    for shard in range(shards):
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / f"model-{shard}.safetensors")
    return folder


def adapter(extra=(), **fields) -> Adapter:
    tensors = pair(Q, 4, seed=1) | pair(UP, 4, seed=2) | dict(extra)
    return adapter_from_tensors(tensors, config(**fields), name="a")


def product(part):
    return part.scale * part.b.astype(np.float64) @ part.a.astype(np.float64)


def merged(tmp_path, adapters, base=None, **options):
    base = write_base(tmp_path / "base") if base is None else base
    report = merge_adapters(base, adapters, tmp_path / "out", **options)
    tensors = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        tensors |= load_file(file)
    return report, tensors


@pytest.mark.parametrize("shards", [1, 3])
def test_every_file_of_the_base_is_written_anew(tmp_path, shards):
    one = adapter()
    base = write_base(tmp_path / "base", shards=shards)
    report, tensors = merged(tmp_path, [one], base)
    assert tensors.keys() == BASE.keys()
    for name, before in BASE.items():
        part = one.parts.get(name.removesuffix(".weight"))
        after = before + (0 if part is None else product(part))
        np.testing.assert_allclose(tensors[name], after, atol=1e-6)
    assert sorted(row.module for row in report.modules) == [UP, Q]
    assert not report.untied
    names = {file.name for file in (tmp_path / "out").iterdir()}
    index = "model.safetensors.index.json"
    assert {"config.json", "tokenizer.json"} <= names
    assert (index in names) == (shards > 1)
    if shards > 1:
        listed = json.loads((tmp_path / "out" / index).read_text())["weight_map"]
        assert listed.keys() == BASE.keys()


def test_several_adapters_add_by_their_weights(tmp_path):
    one, two = adapter(), adapter(pair(Q, 4, seed=9), lora_alpha=3)
    _, tensors = merged(tmp_path, [one, two], weights=[0.3, -2.0])
    for module in (Q, UP):
        expected = BASE[f"{module}.weight"] + 0.3 * product(one.parts[module])
        expected = expected - 2.0 * product(two.parts[module])
        np.testing.assert_allclose(tensors[f"{module}.weight"], expected, atol=1e-5)


def test_a_sum_is_rounded_once_and_the_loss_is_told(tmp_path):
    """A small change on a coarse grid: adding in bfloat16 would lose all of it."""
    half = {name: a.astype(ml_dtypes.bfloat16) for name, a in BASE.items()}
    small = {name: a * np.float32(0.02) for name, a in pair(Q, 4, seed=1).items()}
    one = adapter(small)
    base = write_base(tmp_path / "base", half)
    report, tensors = merged(tmp_path, [one], base)
    exact = half[f"{Q}.weight"].astype(np.float32) + product(one.parts[Q])
    found = tensors[f"{Q}.weight"]
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found, exact.astype(np.float32).astype(found.dtype))
    row = next(row for row in report.modules if row.module == Q)
    error = np.linalg.norm(found.astype(np.float32) - exact)
    assert row.loss == pytest.approx(
        error / np.linalg.norm(product(one.parts[Q])), rel=0.01
    )
    assert 0.1 < row.loss == report.loss
    report = merge_adapters(base, [one], tmp_path / "wide", dtype="float32")
    assert report.loss < 1e-4
    wide = load_file(tmp_path / "wide" / "model-0.safetensors")
    assert {array.dtype for array in wide.values()} == {np.dtype(np.float32)}


EMBED_PAIR = {
    f"{EMBED}.lora_embedding_A": normal(RNG, 4, 100),
    f"{EMBED}.lora_embedding_B": normal(RNG, WIDTH, 4),
}
HEAD_PAIR = {
    f"{HEAD}.lora_A.weight": normal(RNG, 4, WIDTH),
    f"{HEAD}.lora_B.weight": normal(RNG, 100, 4),
}
ROWS = {f"{EMBED}.token_adapter.trainable_tokens_delta": normal(RNG, 2, WIDTH)}


def settings_of(tmp_path):
    return json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_tied_head_is_untied_when_it_comes_to_differ(tmp_path):
    one = adapter(EMBED_PAIR)
    report, tensors = merged(tmp_path, [one])
    assert report.untied
    assert settings_of(tmp_path)["tie_word_embeddings"] is False
    before = BASE[f"{EMBED}.weight"]
    np.testing.assert_array_equal(tensors[f"{HEAD}.weight"], before)
    after = before + product(one.parts[EMBED]).T
    np.testing.assert_allclose(tensors[f"{EMBED}.weight"], after, atol=1e-6)


def test_a_head_of_a_tied_base_gets_its_own_weight(tmp_path):
    one = adapter(HEAD_PAIR | ROWS, trainable_token_indices=[7, 3])
    report, tensors = merged(tmp_path, [one])
    assert report.untied
    rows = BASE[f"{EMBED}.weight"].copy()
    rows[[7, 3]] = one.parts[EMBED].rows
    np.testing.assert_array_equal(tensors[f"{EMBED}.weight"], rows)
    expected = rows + product(one.parts[HEAD])
    np.testing.assert_allclose(tensors[f"{HEAD}.weight"], expected, atol=1e-6)


def test_token_rows_leave_a_tied_head_tied(tmp_path):
    report, tensors = merged(tmp_path, [adapter(ROWS, trainable_token_indices=[7, 3])])
    assert not report.untied
    assert f"{HEAD}.weight" not in tensors
    assert settings_of(tmp_path)["tie_word_embeddings"] is True


def test_a_grown_vocabulary_is_in_the_config(tmp_path):
    table = normal(RNG, 104, WIDTH)
    one = adapter({f"{EMBED}.weight": table, f"{HEAD}.weight": table + 1})
    _, tensors = merged(tmp_path, [one])
    assert settings_of(tmp_path)["vocab_size"] == 104
    np.testing.assert_array_equal(tensors[f"{HEAD}.weight"], table + 1)


@pytest.mark.parametrize("width", [WIDTH, 3 * WIDTH])
def test_gpt2_stores_its_layers_input_major(tmp_path, width):
    """A square layer would take the update either way round."""
    name = "transformer.h.0.attn.c_attn"
    weight = normal(RNG, WIDTH, width)
    base = write_base(
        tmp_path / "base",
        {f"{name.removeprefix('transformer.')}.weight": weight},
        tied=False,
        model_type="gpt2",
    )
    tensors = {
        f"{name}.lora_A.weight": normal(RNG, 4, WIDTH),
        f"{name}.lora_B.weight": normal(RNG, width, 4),
    }
    one = adapter_from_tensors(tensors, config(), name="a")
    _, found = merged(tmp_path, [one], base)
    (after,) = found.values()
    np.testing.assert_allclose(after, weight + product(one.parts[name]).T, atol=1e-6)


def test_a_copy_of_the_base_layer_must_be_this_bases(tmp_path):
    copy = {f"{EMBED}.base_layer.weight": BASE[f"{EMBED}.weight"]}
    head = {f"{HEAD}.base_layer.weight": BASE[f"{EMBED}.weight"]}
    merged(tmp_path, [adapter(EMBED_PAIR | HEAD_PAIR | copy | head)])
    other = adapter(HEAD_PAIR | {name: array + 1 for name, array in head.items()})
    with pytest.raises(AdapterError, match="lm_head: was trained on another base"):
        merge_adapters(tmp_path / "base", [other], tmp_path / "other")


FAULTS = [
    (pair("model.layers.7.mlp.up_proj", 4), {}, "layers.7.mlp.up_proj: is no module"),
    ({}, {"alora_invocation_tokens": [1]}, "waits for tokens has no merge"),
    ({f"{NORM}.bias": normal(RNG, WIDTH)}, {"bias": "all"}, "the layer has no bias"),
    (
        {
            f"{UP}.lora_A.weight": normal(RNG, 4, 9),
            f"{UP}.lora_B.weight": normal(RNG, 64, 4),
        },
        {},
        "two spellings|update of shape",
    ),
    ({f"{NORM}.weight": normal(RNG, 3, 3)}, {"modules_to_save": ["norm"]}, "has .32,"),
    (ROWS, {"trainable_token_indices": [100, 3]}, "tokens up to 100"),
]


@pytest.mark.parametrize(("extra", "fields", "text"), FAULTS, ids=range(len(FAULTS)))
def test_what_has_no_place_in_the_base_is_refused(tmp_path, extra, fields, text):
    one = adapter_from_tensors(pair(Q, 4) | extra, config(**fields), name="a")
    if "up_proj.lora_A" in "".join(extra) and "layers.0" in "".join(extra):
        one = adapter_from_tensors(extra, config(**fields), name="a")
    base = write_base(tmp_path / "base")
    with pytest.raises(AdapterError, match=text):
        merge_adapters(base, [one], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experts_of_an_unknown_layout_are_not_merged(tmp_path):
    name = "model.layers.0.mlp.experts"
    one = adapter(pair(name, 4))
    base = write_base(tmp_path / "base", BASE | {f"{name}.weight": BASE[f"{Q}.weight"]})
    with pytest.raises(AdapterError, match="kind 'experts' cannot be merged"):
        merge_adapters(base, [one], tmp_path / "out")


def test_an_overflow_of_the_dtype_asked_for_is_refused(tmp_path):
    one = adapter(lora_alpha=4e6)
    with pytest.raises(AdapterError, match="overflows float16"):
        merge_adapters(
            write_base(tmp_path / "base"), [one], tmp_path / "out", dtype="float16"
        )


def test_arguments_are_checked(tmp_path):
    base = write_base(tmp_path / "base")
    with pytest.raises(AdapterError, match="one or more adapters"):
        merge_adapters(base, [], tmp_path / "out")
    with pytest.raises(AdapterError, match="as many weights"):
        merge_adapters(base, [adapter()], tmp_path / "out", weights=[1.0, 2.0])
    with pytest.raises(AdapterError, match="'int8' is none of float32"):
        merge_adapters(base, [adapter()], tmp_path / "out", dtype="int8")
    with pytest.raises(AdapterError, match="is not empty"):
        merge_adapters(base, [adapter()], base)
    grown = adapter({f"{EMBED}.weight": normal(RNG, 104, WIDTH)})
    with pytest.raises(AdapterError, match="cannot resize"):
        merge_adapters(base, [grown, adapter()], tmp_path / "out")


BASES = [
    (lambda folder: (folder / "config.json").unlink(), r"holds no config\.json"),
    (
        lambda folder: (folder / "model-0.safetensors").unlink(),
        r"holds no \*\.safetensors",
    ),
    (
        lambda folder: save_file(BASE, folder / "old.safetensors"),
        "one tensor twice",
    ),
    (
        lambda folder: (folder / "config.json").write_text(
            '{"quantization_config": {"bits": 4}}'
        ),
        "is quantised",
    ),
]


@pytest.mark.parametrize(("spoil", "text"), BASES, ids=range(len(BASES)))
def test_a_folder_that_is_no_plain_model_is_refused(tmp_path, spoil, text):
    base = write_base(tmp_path / "base")
    spoil(base)
    with pytest.raises(ModelError, match=text):
        merge_adapters(base, [adapter()], tmp_path / "out")
