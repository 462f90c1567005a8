"""Tensor names of adapter files: name -> (module, role), and module -> model's module.

The only code that knows how names are spelled. Both steps go by the whole path; no
name is ever guessed from its last component.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from lora_jax.adapters.spellings import canonical

PREFIXES: Mapping[str, str] = {
    "base_model.model.": "",
    "thinker.base_model.model.": "thinker.",
}
"""What wrappers put before the module path -> what stays of it."""


class Role(Enum):
    """What a tensor is to its module."""

    A = "lora_A"
    B = "lora_B"

    def __repr__(self) -> str:
        return str(self)


SUFFIXES: tuple[tuple[re.Pattern[str], Role], ...] = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (r"\.lora_A(?:\.(?P<adapter>.+))?\.weight", Role.A),
        (r"\.lora_B(?:\.(?P<adapter>.+))?\.weight", Role.B),
    )
)
"""End of the name -> role. A raw state dict has the adapter's own name inside."""


@dataclass(frozen=True)
class TensorName:
    """A tensor's name, taken apart.

    Attributes:
      module: module path without the wrappers' prefix.
      role: what the tensor is to the module.
      adapter: adapter name inside the tensor's name, "" where there is none.
    """

    module: str
    role: Role
    adapter: str


def read_name(name: str) -> TensorName | None:
    """Returns the parts of a tensor's name, or None for an unknown spelling.

    Example:
      >>> read_name("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight")
      TensorName(module='model.layers.0.mlp.up_proj', role=Role.A, adapter='')
    """
    path = strip_prefix(name)
    for suffix, role in SUFFIXES:
        found = suffix.search(path)
        if found and found.end() == len(path) and found.start() > 0:
            return TensorName(path[: found.start()], role, found["adapter"] or "")
    return None


def strip_prefix(name: str) -> str:
    """Returns the name without the wrappers' prefix, where it has one."""
    for prefix, kept in PREFIXES.items():
        if name.startswith(prefix):
            return kept + name.removeprefix(prefix)
    return name


def match_modules(
    modules: Iterable[str], known: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Matches an adapter's module paths to a model's, by whole path.

    A path that the model has is itself; any other is compared in the form that all
    documented spellings of one module share (`spellings.canonical`). A path that could
    be two of the model's is not guessed, and counts as unmatched.

    Returns:
      adapter's module -> the model's name for it, and the modules without a match. Two
      modules may have the same match; whoever places them refuses that.

    Example:
      >>> match_modules(["layers.0.mlp.up_proj"], ["model.layers.0.mlp.up_proj"])
      ({'layers.0.mlp.up_proj': 'model.layers.0.mlp.up_proj'}, [])
    """
    exact = frozenset(known)
    by_form: dict[str, list[str]] = {}
    for name in sorted(exact):
        by_form.setdefault(canonical(name), []).append(name)
    matched: dict[str, str] = {}
    unmatched: list[str] = []
    for module in modules:
        names = [module] if module in exact else by_form.get(canonical(module), [])
        if len(names) == 1:
            matched[module] = names[0]
        else:
            unmatched.append(module)
    return matched, unmatched
