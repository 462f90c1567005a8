"""What a user calls an adapter -> the folder it lies in: local first, then the hub.

A folder that is there is never looked up anywhere else, whatever its name looks like.
"""

import re
from pathlib import Path

from lora_jax.errors import AdapterError, AdapterNotFoundError

HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
"""`owner/name` or `owner/name@revision`."""

FILES = (".safetensors", ".bin", ".pt")

WANTED = ["adapter_*", "adapters.safetensors", "*/adapter_*"]
"""Files of a hub repository that an adapter needs."""


def find_adapter(path: str, *, root: Path | None = None) -> Path:
    """Returns the folder of an adapter, or its weights file if the path is one.

    Args:
      path: absolute or relative folder, `~/...`, or a hub id `owner/name[@revision]`.
      root: folder that the result must lie in, symbolic links followed; None for any.
        With a root, relative paths start there and the hub is not asked.

    Raises:
      AdapterNotFoundError: if there is nothing by that name.
      AdapterError: if it lies outside the root.
    """
    try:
        local = Path(path).expanduser()
        local = local if root is None else root.expanduser() / local
        if root is not None:
            check_inside(local, root)
        if local.is_dir() or (local.is_file() and local.suffix in FILES):
            return local
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterNotFoundError(
            f"adapter {path[:200]!r}: is no path: {error}."
        ) from error
    hub = HUB_ID.fullmatch(path)
    if root is None and hub and not path.startswith((".", "~", "/")):
        return _download(path, hub["repo"], hub["revision"])
    bare, _, revision = path.rpartition("@")
    hint = ""
    if bare and Path(bare).expanduser().is_dir():
        hint = f" ({bare} is there; a local folder has no revision {revision!r})"
    raise AdapterNotFoundError(
        f"adapter {local.name!r}: there is no folder {local}{hint}; give the folder "
        "that holds adapter_config.json, or a hub id owner/name@revision."
    )


def check_inside(path: Path, root: Path) -> None:
    """Refuses a path that, with symbolic links followed, lies outside the root.

    Raises:
      AdapterError: naming both.
    """
    if not path.resolve().is_relative_to(root.expanduser().resolve()):
        raise AdapterError(
            f"{path}: lies outside {root}, where adapters may be loaded from."
        )


def _download(path: str, repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(repo, revision=revision, allow_patterns=WANTED)
    except Exception as error:  # the hub's client raises its own, httpx's and OSErrors
        raise AdapterNotFoundError(
            f"adapter {path!r}: there is no such folder, and the hub did not give it: "
            f"{error}"
        ) from error
    return Path(found)
