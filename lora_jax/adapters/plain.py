"""A config built in Python -> the values that its JSON file would have.

`peft.LoraConfig.to_dict()` holds sets, tuples and enumerations; a caller's dictionary
may hold NumPy's numbers.
"""

import dataclasses
from collections.abc import Mapping, Set
from enum import Enum

import numpy as np


def to_plain(config: Mapping[str, object]) -> dict[str, object]:
    """Returns the config in JSON's words; a value that has none stays as it is.

    Example:
      >>> to_plain({"target_modules": {"v_proj", "q_proj"}, "r": np.int64(8)})
      {'target_modules': ['q_proj', 'v_proj'], 'r': 8}
    """
    return {str(name): _plain(value) for name, value in config.items()}


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return to_plain(value)
    if isinstance(value, Set):
        return sorted(map(_plain, value), key=str)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_plain(dataclasses.asdict(value))
    return value
