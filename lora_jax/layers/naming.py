"""Other names for a model's modules, so that adapter files find a model of any shape.

An adapter names modules as the Hugging Face model does; a model that someone else wrote
names them as he liked. A table says which is which, by prefixes:

    {"model.layers.*.self_attn": "layers.*.attn", "model.layers.*.mlp": "layers.*.ffw"}

`*` stands for one component of a path, the same on both sides.

Of a fused layer an adapter may name each part, or several of them by one name; the
model's class says which, with vLLM's attribute:

    packed_modules_mapping = {"in_proj_qkv": ("q", "k", "v"), "in_proj_z": ("z",)}
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from lora_jax.errors import ConfigError, faults
from lora_jax.layers.base import PartKey


def other_names(paths: Iterable[str], table: Mapping[str, str]) -> dict[str, str]:
    """Returns every further name of the model's paths: Hugging Face name -> path.

    Args:
      paths: module paths of the model.
      table: Hugging Face prefix -> the model's prefix.
    Raises:
      ConfigError: if a row fits no path, or its two sides have other numbers of `*`.

    Example:
      >>> other_names(["layers.3.attn.q"], {"layers.*.self_attn": "layers.*.attn"})
      {'layers.3.self_attn.q': 'layers.3.attn.q'}
    """
    problems = []
    names: dict[str, str] = {}
    known = list(paths)
    for theirs, ours in table.items():
        if theirs.count("*") != ours.count("*"):
            problems.append(f"{theirs!r}: {ours!r} has another number of '*'.")
            continue
        pattern = re.compile(re.escape(ours).replace(r"\*", r"([^.]+)") + r"(\..*)?")
        found = [(path, match) for path in known if (match := pattern.fullmatch(path))]
        if not found:
            problems.append(f"{theirs!r}: {ours!r} begins no module of the model.")
        for path, match in found:
            *stars, rest = match.groups()
            names[_filled(theirs, stars) + (rest or "")] = path
    if problems:
        raise ConfigError(faults("module_names cannot be used:", problems))
    return names


def group_names(
    parts: Sequence[tuple[str, int]], packed: Mapping[str, Sequence[str]]
) -> tuple[tuple[str, PartKey], ...]:
    """Returns every row of the table that names parts of one fused layer.

    Args:
      parts: `(name, width)` of the layer's parts.
      packed: `packed_modules_mapping` of the model; its order is that of the B rows.

    Example:
      >>> group_names((("q", 8), ("k", 2), ("v", 2)), {"qk": ("q", "k"), "w": ("w",)})
      (('qk', (0, 1)),)
    """
    numbers = {name: number for number, (name, _) in enumerate(parts)}
    if len(numbers) == 1:
        return ()
    groups = {
        name: tuple(numbers[child] for child in children)
        for name, children in packed.items()
        if set(children) <= set(numbers)
    }
    every = tuple(range(len(parts)))
    return tuple((n, None if key == every else key) for n, key in groups.items())


def _filled(template: str, stars: list[str]) -> str:
    """Puts one value for each `*` into the template."""
    pieces = template.split("*")
    return pieces[0] + "".join(s + p for s, p in zip(stars, pieces[1:], strict=True))
