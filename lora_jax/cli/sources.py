"""What several commands share: parsing options, adapters by name, a disk cache."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lora_jax.adapters import load_adapter
from lora_jax.errors import AdapterError, ConfigError
from lora_jax.models import cache_dir

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
CACHED_FROM = 0.2
"""Seconds of compilation from which a program is kept on disk."""


def lora_option(text: str) -> tuple[str, Path]:
    """Parses NAME=DIR.

    Raises:
      argparse.ArgumentTypeError: if it is something else.
    """
    name, separator, folder = text.partition("=")
    if not separator or not name or not folder:
        raise argparse.ArgumentTypeError(f"expected NAME=DIR, found {text!r}")
    return name, Path(folder).expanduser()


def positive(text: str) -> int:
    """Parses an integer of at least 1."""
    value = _integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, found {text!r}")
    return value


def not_negative(text: str) -> int:
    """Parses an integer of at least 0."""
    value = _integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected an integer >= 0, found {text!r}")
    return value


def unique_names(options: Sequence[tuple[str, Path]]) -> dict[str, Path]:
    """Returns name -> folder.

    Raises:
      ConfigError: if a name is given twice.
    """
    named = dict(options)
    if len(named) < len(options):
        names = [name for name, _ in options]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"--lora: the names {', '.join(twice)} are given twice.")
    return named


def largest_rank(folders: Mapping[str, Path], limit: int | None) -> int:
    """Reads every adapter once and returns the largest rank among them.

    Raises:
      AdapterError: one text for all adapters that cannot be read, or whose rank exceeds
        `limit`.
    """
    ranks, found = [1], []
    for name, folder in folders.items():
        try:
            adapter = load_adapter(folder, name=name, max_lora_rank=limit)
        except AdapterError as error:
            found.append(str(error))
        else:
            ranks.append(adapter.rank)
    if found:
        raise AdapterError("\n".join(found))
    return max(ranks)


def keep_compiled_programs() -> None:
    """Lets JAX keep compiled programs on disk, so that the next run starts at once.

    `JAX_COMPILATION_CACHE_DIR` has precedence over the library's own cache folder.
    """
    import jax

    if not os.environ.get(CACHE_VARIABLE):
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", CACHED_FROM)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected an integer, found {text!r}"
        ) from None
