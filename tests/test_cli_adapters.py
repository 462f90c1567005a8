"""`convert`, `merge` and `extract` on files: what they write, and what they refuse."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adapter_files import UP, WIDTH, Q, config, normal, pair, write
from lora_jax.adapters import load_adapter
from lora_jax.cli import main

RNG = np.random.default_rng(7)
BASE = {
    "model.embed_tokens.weight": normal(RNG, 100, WIDTH),
    f"{Q}.weight": normal(RNG, WIDTH, WIDTH),
    f"{UP}.weight": normal(RNG, 64, WIDTH),
}


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(BASE, folder / "model.safetensors")
    return folder


@pytest.fixture
def adapter(tmp_path):
    return write(tmp_path / "sql", pair(Q, 4, seed=1) | pair(UP, 4, seed=2), config())


def product(part):
    return part.scale * part.b @ part.a


def test_convert_writes_what_it_read(tmp_path, adapter, capsys):
    assert main(["convert", str(adapter), str(tmp_path / "out")]) == 0
    first, second = load_adapter(adapter), load_adapter(tmp_path / "out")
    assert first.content_hash == second.content_hash
    assert "2 modules, rank 4 or less" in capsys.readouterr().out


def test_convert_reads_other_frameworks_and_reduces_the_rank(tmp_path, capsys):
    tensors = {
        f"{Q}.lora_down.weight": normal(RNG, 8, WIDTH),
        f"{Q}.lora_up.weight": normal(RNG, WIDTH, 8),
    }
    save_file(tensors, tmp_path / "style.safetensors")
    words = ["convert", str(tmp_path / "style.safetensors"), str(tmp_path / "out")]
    assert main(words) == 0
    assert "converted from kohya's format" in capsys.readouterr().out
    assert load_adapter(tmp_path / "out").rank == 8
    assert main([*words, "--rank", "2"]) == 0
    assert "rank 2 keeps" in capsys.readouterr().out
    assert load_adapter(tmp_path / "out").rank == 2


def test_merge_adds_adapters_by_their_weights(tmp_path, base, adapter, capsys):
    out = tmp_path / "out"
    words = ["merge", "--model", str(base), "--output", str(out)]
    assert main([*words, "--lora", f"{adapter}=0.5", "--lora", str(adapter)]) == 0
    found = load_file(out / "model.safetensors")
    part = load_adapter(adapter).parts[Q]
    expected = BASE[f"{Q}.weight"] + 1.5 * product(part)
    np.testing.assert_allclose(found[f"{Q}.weight"], expected, atol=1e-5)
    shown = capsys.readouterr().out
    assert "lost by rounding" in shown
    assert main([*words, "--lora", str(adapter)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main([*words, "--lora", f"{adapter}=much"]) == 2
    assert "'much' is no number" in capsys.readouterr().err


def test_extract_undoes_merge(tmp_path, base, adapter, capsys):
    words = ["--model", str(base), "--output"]
    merged, again = str(tmp_path / "merged"), str(tmp_path / "again")
    assert main(["merge", *words, merged, "--lora", str(adapter)]) == 0
    assert main(["extract", *words, again, "--tuned", merged, "--rank", "4"]) == 0
    first, second = load_adapter(adapter).parts, load_adapter(again).parts
    assert first.keys() == second.keys()
    for module, part in first.items():
        np.testing.assert_allclose(product(second[module]), product(part), atol=1e-5)
    assert "rank 4 keeps 100.00% of the change" in capsys.readouterr().out


def test_what_is_not_there_is_one_message_and_exit_code_2(tmp_path, base, capsys):
    assert main(["convert", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    words = ["extract", "--model", str(base), "--tuned", str(base), "--rank", "4"]
    assert main([*words, "--output", str(tmp_path / "out")]) == 2
    assert "does not differ" in capsys.readouterr().err
