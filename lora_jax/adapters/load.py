"""A path, or tensors in memory -> Adapter: the two public ways in."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lora_jax.adapters.adapter import Adapter
from lora_jax.adapters.build import Source, build_adapter
from lora_jax.adapters.folder import read_folder
from lora_jax.adapters.location import find_folder


def load_adapter(
    path: str | os.PathLike[str],
    adapter_id: int | None = None,
    *,
    name: str | None = None,
    max_lora_rank: int | None = None,
    allow_nonfinite: bool = False,
    root: str | os.PathLike[str] | None = None,
) -> Adapter:
    """Reads an adapter's folder.

    Args:
      path: the folder with `adapter_config.json` and the weights, absolute, relative,
        or with `~`; where there is none, a hub id `owner/name[@revision]`.
      adapter_id: id in 1..2**31-1, or None for the process's next free one.
      name: name to know it by, or None for the folder's name.
      max_lora_rank: refuse modules of a larger rank; None for no limit.
      allow_nonfinite: let NaN and infinity pass, which are else refused.
      root: folder that everything read must lie in, symbolic links followed; relative
        paths start there. None lets any path pass.

    Returns:
      The adapter; every tensor of the file is in its parts or, with the reason, in its
      report.

    Raises:
      AdapterNotFoundError: if there is no folder or no config.
      AdapterError: if anything in it cannot be applied exactly, naming every fault.
    """
    top = None if root is None else Path(root)
    folder = read_folder(find_folder(os.fspath(path), root=top), root=top)
    source = Source(
        tensors=folder.tensors,
        config=folder.config,
        where=str(folder.path),
        max_lora_rank=max_lora_rank,
        allow_nonfinite=allow_nonfinite,
    )
    shown = Path(os.path.abspath(folder.path)).name if name is None else name
    return build_adapter(source, name=shown, adapter_id=adapter_id)


def adapter_from_tensors(
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, object],
    *,
    name: str,
    adapter_id: int | None = None,
    max_lora_rank: int | None = None,
    allow_nonfinite: bool = False,
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
    source = Source(
        tensors={key: _read_only(value) for key, value in tensors.items()},
        config=config,
        where="tensors in memory",
        max_lora_rank=max_lora_rank,
        allow_nonfinite=allow_nonfinite,
    )
    return build_adapter(source, name=name, adapter_id=adapter_id)


def _read_only(array: np.ndarray) -> np.ndarray:
    copy = np.array(array)
    copy.setflags(write=False)
    return copy
