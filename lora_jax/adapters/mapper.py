"""Module paths of a checkpoint -> a model's own, where the two are known to differ.

Runs after the adapter is built, so ranks and scales are found by the file's own names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lora_jax.adapters.names import strip_prefix


@dataclass(frozen=True)
class NameMapper:
    """A model's way with names, as vLLM's `WeightsMapper` and `lora_skip_prefixes`.

    Attributes:
      prefixes: beginning of a path -> what stands in its place; the first counts.
      substrings: any part of a path -> what stands in its place; all count, in order.
      skip_prefixes: tensors under these are ignored, e.g. `mtp.` for a model without
        heads that predict several tokens.

    Example:
      >>> NameMapper(prefixes={"transformer.": "model."}).map("transformer.layers.0")
      'model.layers.0'
    """

    prefixes: Mapping[str, str] = field(default_factory=dict)
    substrings: Mapping[str, str] = field(default_factory=dict)
    skip_prefixes: tuple[str, ...] = ()

    def map(self, module: str) -> str:
        """Returns the model's path of a module."""
        for old, new in self.prefixes.items():
            if module.startswith(old):
                module = new + module.removeprefix(old)
                break
        for old, new in self.substrings.items():
            module = module.replace(old, new)
        return module

    def skips(self, tensor: str) -> bool:
        """Whether a tensor of this name in the file is to be ignored."""
        skipped = self.skip_prefixes
        return bool(skipped) and strip_prefix(tensor).startswith(skipped)
