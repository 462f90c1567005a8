"""Adapter files of other frameworks: detected by content, turned into PEFT's words.

A new format is a new file here and a row in `FORMATS`.
"""

from dataclasses import replace

from lora_jax.adapters.formats import kohya, mlx, torchtune, tunix
from lora_jax.adapters.formats.converted import Config, Converted, Format, Tensors

FORMATS: tuple[Format, ...] = (
    torchtune.FORMAT,
    kohya.FORMAT,
    tunix.FORMAT,
    mlx.FORMAT,
)
"""The first that detects a file converts it; a file that none detects is PEFT's."""


def to_peft(
    tensors: Tensors, config: Config, base: Config
) -> tuple[str, Converted] | None:
    """Returns the format's name and the adapter in PEFT's words; None for PEFT's own.

    Args:
      tensors: the file's tensors.
      config: the config beside them, empty where there is none.
      base: the base model's `config.json`, empty where it is not known.
    """
    for form in FORMATS:
        if form.detects(tensors, config):
            return form.name, _complete(form.converts(tensors, config, base), tensors)
    return None


def _complete(converted: Converted, tensors: Tensors) -> Converted:
    """Adds a fault if two names of the file became one."""
    kept = {converted.origins[name] for name in converted.tensors}
    lost = tensors.keys() - kept - converted.read.keys()
    if not lost:
        return converted
    text = f"{', '.join(sorted(lost))}: another tensor of the file has the same meaning"
    return replace(converted, faults=(*converted.faults, text))
