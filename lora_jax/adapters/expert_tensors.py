"""The tensors of a model's folder -> where each expert's projections lie, by name.

Checkpoints keep experts in one of two layouts:

    experts.gate_up_proj            (experts, d_out, d_in), or (experts, d_in, d_out)
    experts.3.gate_proj.weight      (d_out, d_in); Mixtral's w1, w3 and w2

An adapter may name them by either layout, whichever the folder has.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lora_jax.adapters.expert_layout import ExpertShape

INTERLEAVED = ("gpt_oss",)
"""Model types whose gate and up alternate in `gate_up_proj`; else gate comes first."""

SPELLINGS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")),
    "up_proj": (("up_proj", "w1"),),
    "down_proj": (("down_proj", "w2"),),
}
"""Name of a projection of all experts -> the names of its parts in one expert."""

_FUSED = re.compile(rf"(?P<root>(?:.*\.)?experts)\.(?P<name>{'|'.join(SPELLINGS)})")
_SINGLE = re.compile(
    r"(?P<root>(?:.*\.)?experts)\.(?P<expert>\d+)"
    r"\.(?P<name>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)


@dataclass(frozen=True)
class Rows:
    """The rows of one expert's part of a projection in one tensor.

    Attributes:
      tensor: its name in the folder.
      expert: index into the tensor's first axis; None: the tensor is this expert's.
      rows: which of the expert's outputs.
      in_out: whether the outputs are the tensor's last axis.
    """

    tensor: str
    expert: int | None
    rows: slice
    in_out: bool


@dataclass(frozen=True, eq=False)
class Place:
    """What one name of an adapter means.

    Attributes:
      shape: of the experts that are named, and of the parts together.
      rows: for each expert the rows of each part, in the order of the parts.
      interleaved: whether the rows of B alternate between the parts.
    """

    shape: ExpertShape
    rows: tuple[tuple[Rows, ...], ...]
    interleaved: bool


Shapes = Mapping[str, tuple[int, ...]]


def expert_places(shapes: Shapes, model_type: object) -> dict[str, Place]:
    """Returns every name that an adapter may have for experts, and what it means.

    Experts that are kept in no layout above have no names.

    Args:
      shapes: of the folder's tensors, by name.
      model_type: by the folder's config.

    Example::

        expert_places(base.shapes, "qwen3_moe")["model.layers.0.mlp.experts.3.up_proj"]
    """
    places: dict[str, Place] = {}
    for root, found in _by_root(_FUSED, shapes).items():
        places |= _fused(root, found, shapes, model_type in INTERLEAVED)
    for root, found in _by_root(_SINGLE, shapes).items():
        places |= _single(root, found, shapes)
    return places


def _by_root(
    pattern: re.Pattern[str], shapes: Shapes
) -> dict[str, list[re.Match[str]]]:
    found: dict[str, list[re.Match[str]]] = {}
    for name in shapes:
        if match := pattern.fullmatch(name):
            found.setdefault(match["root"], []).append(match)
    return found


def _fused(
    root: str, found: list[re.Match[str]], shapes: Shapes, interleaved: bool
) -> dict[str, Place]:
    own = {match["name"]: shapes[match[0]] for match in found}
    in_out = _stored_in_out(own)
    if in_out is None:
        return {}
    places: dict[str, Place] = {}
    for name, (experts, first, second) in own.items():
        d_in, d_out = (first, second) if in_out else (second, first)
        number = len(SPELLINGS[name])
        mixed = interleaved and number > 1
        cuts = [_cut(part, number, d_out, mixed) for part in range(number)]
        rows = tuple(
            tuple(Rows(f"{root}.{name}", expert, cut, in_out) for cut in cuts)
            for expert in range(experts)
        )
        shape = ExpertShape(experts, d_in, d_out, in_out)
        places |= _names(root, name, Place(shape, rows, mixed))
    return places


def _cut(part: int, parts: int, d_out: int, mixed: bool) -> slice:
    width = d_out // parts
    return (
        slice(part, None, parts) if mixed else slice(part * width, part * width + width)
    )


def _stored_in_out(own: Mapping[str, tuple[int, ...]]) -> bool | None:
    """Tells the axes by the two projections' shapes; None: they are of no gated block.

    The first is of width `d` and `parts * w`, the second of `w` and `d`. Only square
    experts without a gate would fit both ways; no model stores those transposed.
    """
    first = next((name for name in ("gate_up_proj", "up_proj") if name in own), None)
    if first is None or "down_proj" not in own or len(own) != 2:
        return None
    if {len(shape) for shape in own.values()} != {3}:
        return None
    (experts, p, q), (others, s, t) = own[first], own["down_proj"]
    parts = len(SPELLINGS[first])
    if experts == others and (p, q) == (parts * t, s):
        return False
    return True if experts == others and (q, p) == (parts * s, t) else None


def _single(root: str, found: list[re.Match[str]], shapes: Shapes) -> dict[str, Place]:
    tensors = {(match["name"], int(match["expert"])): match[0] for match in found}
    stored = {name for name, _ in tensors}
    experts = 1 + max(expert for _, expert in tensors)
    places: dict[str, Place] = {}
    gated = not stored.isdisjoint(("gate_proj", "w3"))
    for name in ("gate_up_proj" if gated else "up_proj", "down_proj"):
        spelled = [[n for n in some if n in stored] for some in SPELLINGS[name]]
        rows = tuple(
            tuple(
                Rows(tensors[n, expert], None, slice(None), False)
                for some in spelled
                for n in some
                if (n, expert) in tensors
            )
            for expert in range(experts)
        )
        kinds = {shapes[part.tensor] for some in rows for part in some}
        if {len(some) for some in rows} != {len(spelled)} or len(kinds) != 1:
            continue
        ((width, d_in),) = kinds
        shape = ExpertShape(experts, d_in, width * len(spelled), False)
        places |= _names(root, name, Place(shape, rows, False))
    return places


def _names(root: str, name: str, whole: Place) -> dict[str, Place]:
    """Gives the projection's names: of all experts or one, of all parts or one."""
    named = dict(_relative_names(name, whole))
    return {f"{root}.{key}": place for key, place in named.items()}


def _relative_names(name: str, whole: Place) -> Iterator[tuple[str, Place]]:
    every = range(whole.shape.experts)
    for part, spellings in enumerate(SPELLINGS[name]):
        for spelling in spellings:
            yield spelling, _some(whole, every, (part,))
            for expert in every:
                yield f"{expert}.{spelling}", _some(whole, (expert,), (part,))
    parts = tuple(range(len(SPELLINGS[name])))
    yield name, whole
    for expert in every:
        one = _some(whole, (expert,), parts)
        yield f"{expert}.{name}", one
        yield f"{name}s.{expert}", one


def _some(
    whole: Place, experts: range | tuple[int, ...], parts: tuple[int, ...]
) -> Place:
    number = len(whole.rows[0])
    shape = ExpertShape(
        len(experts),
        whole.shape.d_in,
        whole.shape.d_out // number * len(parts),
        whole.shape.stored_in_out,
    )
    rows = tuple(tuple(whole.rows[e][part] for part in parts) for e in experts)
    return Place(shape, rows, whole.interleaved and len(parts) > 1)
