"""A path, or tensors in memory -> Adapter: the two public ways in."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from lora_jax.adapters.adapter import Adapter
from lora_jax.adapters.build import Source, build_adapter
from lora_jax.adapters.config import read_meaning
from lora_jax.adapters.folder import read_file, read_folder, read_json
from lora_jax.adapters.formats import to_peft
from lora_jax.adapters.formats.converted import base_name
from lora_jax.adapters.location import find_adapter
from lora_jax.adapters.mapper import NameMapper
from lora_jax.adapters.plain import to_plain
from lora_jax.errors import AdapterError, faults


def load_adapter(
    path: str | os.PathLike[str],
    adapter_id: int | None = None,
    *,
    name: str | None = None,
    max_lora_rank: int | None = None,
    allow_nonfinite: bool = False,
    root: str | os.PathLike[str] | None = None,
    base_config: Mapping[str, object] | None = None,
    mapper: NameMapper | None = None,
    local_experts: range | None = None,
) -> Adapter:
    """Reads an adapter's folder.

    Args:
      path: the folder with `adapter_config.json` and the weights, absolute, relative,
        or with `~`; or a weights file of another framework; where there is neither, a
        hub id `owner/name[@revision]`.
      adapter_id: id in 1..2**31-1, or None for the process's next free one.
      name: name to know it by, or None for the folder's name.
      max_lora_rank: refuse modules of a larger rank; None for no limit.
      allow_nonfinite: let NaN and infinity pass, which are else refused.
      root: folder that everything read must lie in, symbolic links followed; relative
        paths start there. None lets any path pass.
      base_config: the base model's `config.json`, which a few formats need; None takes
        that of the base model that the adapter names, if it is a folder here and no
        root is set.
      mapper: how the model's names differ from the file's, None where they do not.
      local_experts: experts that this process holds. Tensors of one other expert are
        not read: they take no time and no memory, and the report names them. Tensors
        of all experts are read whole. `content_hash` is of what was read. None reads
        everything.

    Returns:
      The adapter; every tensor of the file is in its parts or, with the reason, in its
      report.

    Raises:
      AdapterNotFoundError: if there is no folder or no config.
      AdapterError: if anything in it cannot be applied exactly, naming every fault.
    """
    top = None if root is None else Path(root)
    found = find_adapter(os.fspath(path), root=top)
    full = Path(os.path.abspath(found))
    shown = name or (full.name if found.is_dir() else full.stem)
    if found.is_dir():
        check = partial(_check_rank, shown, found, max_lora_rank)
        folder = read_folder(found, root=top, check=check, local_experts=local_experts)
    else:
        folder = read_file(found, root=top, local_experts=local_experts)
    source = _source(
        folder.tensors,
        folder.config,
        {} if base_config is None and top is not None else base_config,
        where=str(folder.path),
        max_lora_rank=max_lora_rank,
        allow_nonfinite=allow_nonfinite,
        mapper=NameMapper() if mapper is None else mapper,
    )
    source = replace(source, unread=folder.unread, local_experts=local_experts)
    return build_adapter(source, name=shown, adapter_id=adapter_id)


def adapter_from_tensors(
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, object],
    *,
    name: str,
    adapter_id: int | None = None,
    max_lora_rank: int | None = None,
    allow_nonfinite: bool = False,
    base_config: Mapping[str, object] | None = None,
    mapper: NameMapper | None = None,
) -> Adapter:
    """Builds an adapter from arrays with PEFT's names and a config with PEFT's fields.

    The arrays are copied, so that later changes to them do not reach the adapter.

    Example:
      >>> import numpy as np
      >>> q_proj = "model.layers.0.self_attn.q_proj"
      >>> adapter = adapter_from_tensors(
      ...     {
      ...         f"{q_proj}.lora_A.weight": np.ones((4, 32), np.float32),
      ...         f"{q_proj}.lora_B.weight": np.ones((32, 4), np.float32),
      ...     },
      ...     {"r": 4, "lora_alpha": 8},
      ...     name="toy",
      ... )
      >>> adapter.rank, adapter.parts[q_proj].scale
      (4, 2.0)

    Raises:
      AdapterError: as `load_adapter`.
    """
    source = _source(
        {key: _read_only(value) for key, value in tensors.items()},
        to_plain(config),
        base_config,
        where="tensors in memory",
        max_lora_rank=max_lora_rank,
        allow_nonfinite=allow_nonfinite,
        mapper=NameMapper() if mapper is None else mapper,
    )
    return build_adapter(source, name=name, adapter_id=adapter_id)


def _check_rank(
    name: str, path: Path, limit: int | None, config: Mapping[str, object]
) -> None:
    """Refuses, before weights are read, a PEFT config of too large ranks only."""
    meaning, found = read_meaning(config)
    if limit is None or meaning is None or meaning.rank is None:
        return
    ranks = [meaning.rank, *meaning.rank_pattern.values()]
    if min(ranks) > limit:
        found.append(
            f"config: rank {max(ranks)} exceeds max_lora_rank={limit}; raise "
            "max_lora_rank, or reduce the adapter's rank"
        )
        headline = f"adapter {name!r} ({path}) cannot be read:"
        raise AdapterError(faults(headline, found))


def _source(
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, object],
    base_config: Mapping[str, object] | None,
    *,
    where: str,
    max_lora_rank: int | None,
    allow_nonfinite: bool,
    mapper: NameMapper,
) -> Source:
    """The source in PEFT's words, whichever framework wrote it."""
    source = Source(
        tensors, config, where, max_lora_rank, allow_nonfinite, mapper=mapper
    )
    base = _base_config(config) if base_config is None else base_config
    other = to_peft(tensors, config, base)
    if other is None:
        return source
    form, converted = other
    return replace(
        source,
        tensors=converted.tensors,
        config=converted.config,
        notes=(f"converted from {form}'s format",),
        origins=converted.origins,
        read=converted.read,
        faults=converted.faults,
    )


def _base_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """The config of the base model that an adapter names, if it is a folder here."""
    name = base_name(config)
    path = Path(name).expanduser() / "config.json" if name else None
    try:
        return read_json(path) if path is not None and path.is_file() else {}
    except (OSError, ValueError, RuntimeError):
        return {}


def _read_only(array: np.ndarray) -> np.ndarray:
    copy = np.array(array)
    copy.setflags(write=False)
    return copy
