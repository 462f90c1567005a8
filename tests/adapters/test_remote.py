"""Tensors of experts that other processes hold: never read, always told."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from expert_files import ALPHA, EXPERTS, FILES, Sizes
from lora_jax.adapters import (
    Adapter,
    combine_adapters,
    load_adapter,
    merge_adapters,
    safetensors_file,
    save_adapter,
)
from lora_jax.adapters.remote import expert_of, is_remote
from lora_jax.errors import AdapterError

SIZES = Sizes(4, 12, 10)
LOCAL = range(2, 4)


def save(folder: Path, layout: str, form: str = "safetensors") -> int:
    """Writes a file of a layout; returns its number of tensors."""
    file = FILES[layout](np.random.default_rng(1), SIZES, 3)
    tensors = {f"base_model.model.{name}": t for name, t in file.tensors.items()}
    config = {"peft_type": "LORA", "lora_alpha": ALPHA, **file.config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if form == "safetensors":
        save_file(tensors, folder / "adapter_model.safetensors")
    elif form == "shards":
        names = {name: f"{index % 2}.safetensors" for index, name in enumerate(tensors)}
        for own in set(names.values()):
            shard = {name: t for name, t in tensors.items() if names[name] == own}
            save_file(shard, folder / own)
        index = folder / "adapter_model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": names}))
    else:
        import torch

        values = {name: torch.from_numpy(t) for name, t in tensors.items()}
        torch.save(values, folder / "adapter_model.bin")
    return len(tensors)


def experts_of(adapter: Adapter) -> set[int | None]:
    return {expert_of(f".{module}.") for module in adapter.parts}


@pytest.mark.parametrize("form", ["safetensors", "shards"])
@pytest.mark.parametrize("layout", ["pairs", "mixtral_names", "lists_of_experts"])
def test_tensors_of_remote_experts_are_never_read(layout, form, tmp_path, monkeypatch):
    total = save(tmp_path, layout, form)
    read = []
    original = safetensors_file.read_entry

    def count(file, path, entry):
        read.append(entry)
        return original(file, path, entry)

    monkeypatch.setattr(safetensors_file, "read_entry", count)
    whole = load_adapter(tmp_path)
    assert len(read) == total
    read.clear()
    adapter = load_adapter(tmp_path, local_experts=LOCAL)
    assert len(read) == total // 2
    assert experts_of(adapter) == {2, 3}
    assert adapter.local_experts == LOCAL
    assert adapter.nbytes == whole.nbytes // 2
    for module, part in adapter.parts.items():
        np.testing.assert_array_equal(part.a, whole.parts[module].a)


@pytest.mark.torch
def test_storages_of_remote_experts_are_never_read(tmp_path, monkeypatch):
    from lora_jax.adapters import pickle_file

    total = save(tmp_path, "pairs", "torch")
    read = []
    original = pickle_file._read_storage

    def count(archive, name):
        read.append(name)
        return original(archive, name)

    monkeypatch.setattr(pickle_file, "_read_storage", count)
    adapter = load_adapter(tmp_path, local_experts=LOCAL)
    assert len(read) == total // 2
    assert experts_of(adapter) == {2, 3}


def test_the_report_names_what_was_not_read(tmp_path):
    total = save(tmp_path, "pairs")
    report = load_adapter(tmp_path, local_experts=LOCAL).report
    assert (report.total, report.matched) == (total, total // 2)
    unread = [i.tensor for i in report.ignored if "another process holds" in i.reason]
    assert {expert_of(name) for name in unread} == {0, 1}
    assert len(unread) == total // 2


def test_a_pattern_for_remote_experts_alone_is_no_surprise(tmp_path):
    save(tmp_path, "own_alphas")
    notes = load_adapter(tmp_path, local_experts=LOCAL).report.notes
    assert not any("matches no module" in note for note in notes)


@pytest.mark.parametrize("layout", ["fused", "shared_outer", "router_and_experts"])
def test_tensors_of_all_experts_are_read_whole(layout, tmp_path):
    save(tmp_path, layout)
    whole, adapter = load_adapter(tmp_path), load_adapter(tmp_path, local_experts=LOCAL)
    assert adapter.content_hash == whole.content_hash
    assert not adapter.report.ignored


def test_a_file_of_remote_experts_alone_loads_empty(tmp_path):
    save(tmp_path, "pairs")
    adapter = load_adapter(tmp_path, local_experts=range(0))
    assert not adapter.parts
    single = tmp_path / "adapter_model.safetensors"
    assert not load_adapter(single, local_experts=range(0)).parts


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        (f"{EXPERTS}.7.w1.lora_A.weight", 7),
        (f"{EXPERTS}.down_projs.12.lora_B.weight", 12),
        (f"{EXPERTS}.base_layer.lora_A.weight", None),
        (f"{EXPERTS}.w1.lora_A.weight", None),
        ("model.layers.3.mlp.shared_experts.0.up_proj.lora_A.weight", None),
        ("model.layers.3.mlp.up_proj.lora_A.weight", None),
    ],
)
def test_only_a_number_after_experts_tells_the_expert(name, expert):
    assert expert_of(name) == expert
    assert is_remote(name, range(7)) == (expert is not None)
    assert not is_remote(name, None)


def test_an_adapter_without_remote_experts_is_not_written(tmp_path, tiny_base):
    save(tmp_path, "pairs")
    part = load_adapter(tmp_path, local_experts=LOCAL)
    assert part.is_partial
    assert not load_adapter(tmp_path).is_partial
    with pytest.raises(AdapterError, match=r"holds the experts range\(2, 4\) alone"):
        save_adapter(part, tmp_path / "out")
    with pytest.raises(AdapterError, match="experts of it were not read; load it w"):
        combine_adapters([part, part], [1.0, 1.0], name="sum")
    with pytest.raises(AdapterError, match="experts of it were not read; load it w"):
        merge_adapters(tiny_base, [part], tmp_path / "merged")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def tiny_base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"model.norm.weight": np.ones(4)}, folder / "model.safetensors")
    return folder
