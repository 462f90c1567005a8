"""What every format of another framework is turned into: PEFT's names and fields."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

Tensors = Mapping[str, np.ndarray]
Config = Mapping[str, object]


@dataclass(frozen=True)
class Converted:
    """An adapter in PEFT's words.

    Attributes:
      tensors: PEFT's name -> values; views of the file's own, reshaped at most.
      config: PEFT's config.
      origins: PEFT's name -> the name in the file.
      read: name in the file -> what was read from it that is no tensor of PEFT's.
      faults: one text for each thing that PEFT's words cannot say.
    """

    tensors: Tensors
    config: Config
    origins: Mapping[str, str]
    read: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Format:
    """A row of `FORMATS`.

    Attributes:
      name: what the format is called.
      detects: whether tensors and config are of this format.
      converts: turns them into PEFT's words; the third argument is the base model's
        config, empty where it is not known.
    """

    name: str
    detects: Callable[[Tensors, Config], bool]
    converts: Callable[[Tensors, Config, Config], Converted]


def base_name(config: Config) -> str | None:
    """Returns the base model's name by any framework's field for it."""
    for key in ("base_model_name_or_path", "model", "base_model"):
        value = config.get(key)
        if isinstance(value, str):
            return value
    return None
