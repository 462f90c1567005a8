"""Files of a folder: precedence, shards, links, and what is not followed."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from adapter_files import UP, Q, V, config, pair, pairs, write
from lora_jax.adapters import load_adapter
from lora_jax.errors import AdapterError, AdapterNotFoundError

INDEX = "adapter_model.safetensors.index.json"


def write_shards(folder, change=None):
    """Writes two shards and their index, which `change` may alter."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config()))
    weight_map = {}
    for name, tensors in {
        "1.safetensors": pair(Q, 4),
        "2.safetensors": pair(V, 4),
    }.items():
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(change(index) if change else index))
    return folder


def test_shards_are_one_adapter(tmp_path):
    assert sorted(load_adapter(write_shards(tmp_path)).parts) == [Q, V]


def remap(name, file):
    def change(index):
        index["weight_map"][name] = file
        return index

    return change


A = f"base_model.model.{Q}.lora_A.weight"
SHARDS = [
    (lambda index: {"metadata": {}}, "has no weight_map"),
    (lambda index: {"weight_map": []}, "has no weight_map"),
    (remap(A, "2.safetensors"), "which it denies"),
    (remap("more.weight", "1.safetensors"), "its files lack more.weight"),
    (remap(A, "../1.safetensors"), "no names of files beside it"),
    (remap(A, "/etc/passwd"), "no names of files beside it"),
    (remap(A, "3.safetensors"), "cannot be opened|which it denies"),
    (remap(A, 7), "cannot be opened|which it denies"),
]


@pytest.mark.parametrize(("change", "text"), SHARDS, ids=range(len(SHARDS)))
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, change, text):
    with pytest.raises(AdapterError, match=text):
        load_adapter(write_shards(tmp_path, change))


def test_safetensors_come_before_torch_files(tmp_path):
    write(tmp_path, pairs())
    (tmp_path / "adapter_model.bin").write_bytes(b"not read")
    assert load_adapter(tmp_path).report.matched == 6


def test_a_folder_of_adapters_names_them(tmp_path):
    write(tmp_path / "run" / "checkpoint-500", pairs())
    write(tmp_path / "run" / "other", pairs())
    with pytest.raises(
        AdapterNotFoundError, match=r"give one of .*checkpoint-500, .*other"
    ):
        load_adapter(tmp_path / "run")
    assert load_adapter(tmp_path / "run" / "checkpoint-500").name == "checkpoint-500"


NAMES = ["owner/name", "name@main", "a.dotted.name", "v1.5", "名前"]


@pytest.mark.parametrize("name", NAMES)
def test_a_local_folder_is_itself_whatever_its_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name, pairs())
    assert load_adapter(name).name == name.rpartition("/")[2]


def test_a_local_folder_has_no_revision(tmp_path):
    write(tmp_path / "a", pairs())
    with pytest.raises(
        AdapterNotFoundError, match="local folder has no revision 'main'"
    ):
        load_adapter(f"{tmp_path / 'a'}@main")


PATHS = ["", "nothing", "no/such/thing", "./a/b", "~nobody-here/x", "a\0b", "x" * 5000]


@pytest.mark.parametrize("path", PATHS, ids=range(len(PATHS)))
def test_what_is_not_there_is_not_found(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdapterNotFoundError):
        load_adapter(path)


@pytest.mark.parametrize(
    "path", ["owner/no-such-adapter", "owner/no-such-adapter@main"]
)
def test_a_hub_id_that_the_hub_does_not_give_is_not_found(path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(AdapterNotFoundError, match="the hub did not give it"):
        load_adapter(path)


def test_a_root_holds_every_file(tmp_path):
    root = tmp_path / "root"
    write(root / "good", pairs())
    outside = write(tmp_path / "outside", pairs([UP]))
    assert load_adapter("good", root=root).rank == 4
    (root / "link").symlink_to(outside)
    for path in ("../outside", str(outside), "link", "good/../../outside"):
        with pytest.raises(AdapterError, match="lies outside"):
            load_adapter(path, root=root)
    with pytest.raises(AdapterNotFoundError, match="there is no folder"):
        load_adapter("owner/name", root=root)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_file_that_links_out_of_the_root_is_refused(tmp_path, name):
    root = tmp_path / "root"
    write(root / "bad", pairs())
    outside = write(tmp_path / "outside", pairs())
    (root / "bad" / name).unlink()
    (root / "bad" / name).symlink_to(outside / name)
    assert load_adapter(root / "bad").rank == 4
    with pytest.raises(AdapterError, match="lies outside"):
        load_adapter("bad", root=root)


def test_equal_files_in_two_formats_have_one_hash(tmp_path):
    whole = load_adapter(write(tmp_path / "whole", pair(Q, 4) | pair(V, 4)))
    parts = load_adapter(write_shards(tmp_path / "shards"))
    assert whole.content_hash == parts.content_hash
    np.testing.assert_array_equal(whole.parts[Q].a, parts.parts[Q].a)
