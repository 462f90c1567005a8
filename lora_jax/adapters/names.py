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
    LORA_BIAS = "lora_B.bias"
    MAGNITUDE = "lora_magnitude_vector"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    TOKENS = "trainable_tokens_delta"
    BASE_WEIGHT = "base_layer.weight"
    BASE_BIAS = "base_layer.bias"
    SAVED_WEIGHT = "modules_to_save.weight"
    SAVED_BIAS = "modules_to_save.bias"
    ORIGINAL = "original_module"
    WEIGHT = "weight"
    BIAS = "bias"

    def __repr__(self) -> str:
        return str(self)


RESERVED = frozenset(
    "lora_A lora_B lora_embedding_A lora_embedding_B lora_magnitude_vector lora_a "
    "lora_b lora_down lora_up token_adapter modules_to_save original_module".split()
)
"""Parts of a path that are never a module's name: what has one is no plain weight."""

_INSIDE = r"(?:\.(?P<adapter>.+))?"
"""A raw state dict has the adapter's own name, which may have dots, inside the key."""

SUFFIXES: tuple[tuple[re.Pattern[str], Role], ...] = tuple(
    (re.compile(rf"(?P<module>.+?)\.{suffix}"), role)
    for suffix, role in (
        (rf"lora_A{_INSIDE}\.weight", Role.A),
        (rf"lora_B{_INSIDE}\.weight", Role.B),
        (rf"lora_B{_INSIDE}\.bias", Role.LORA_BIAS),
        (rf"lora_magnitude_vector{_INSIDE}\.weight", Role.MAGNITUDE),
        (rf"lora_magnitude_vector{_INSIDE}", Role.MAGNITUDE),
        (rf"lora_embedding_A{_INSIDE}", Role.EMBEDDING_A),
        (rf"lora_embedding_B{_INSIDE}", Role.EMBEDDING_B),
        (rf"token_adapter\.trainable_tokens_delta{_INSIDE}", Role.TOKENS),
        (r"base_layer\.weight", Role.BASE_WEIGHT),
        (r"base_layer\.bias", Role.BASE_BIAS),
        (rf"modules_to_save{_INSIDE}\.weight", Role.SAVED_WEIGHT),
        (rf"modules_to_save{_INSIDE}\.bias", Role.SAVED_BIAS),
        (r"original_module\.(?:weight|bias)", Role.ORIGINAL),
        (r"weight", Role.WEIGHT),
        (r"bias", Role.BIAS),
    )
)
"""End of a name -> role; the first that fits counts."""


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
        found = suffix.fullmatch(path)
        if found and not any(part in RESERVED for part in found["module"].split(".")):
            inside = found.groupdict().get("adapter")
            return TensorName(found["module"], role, inside or "")
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
