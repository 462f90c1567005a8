"""Finds the layers of a model that can carry LoRA and puts a LoRA layer in their place.

`wrap` exchanges the *class* of each such layer for a subclass of it (Penzai's and qwix'
surgery, without new objects): one object reached by two paths is wrapped once. Which
base layers can be wrapped is the WRAPPERS table (`table.py`).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flax import nnx
from jax.sharding import Mesh

from lora_jax.config import LoRAConfig
from lora_jax.errors import ConfigError, ModelError, faults
from lora_jax.layers.base import (
    LoRALayer,
    LoRARouting,
    LoRASlots,
    Shape,
    Site,
    SlotPlace,
)
from lora_jax.layers.domains import check_multimodal, domain_of, is_left_out
from lora_jax.layers.experts import check_spread
from lora_jax.layers.head import LoRAHead
from lora_jax.layers.linear import LoRALinear
from lora_jax.layers.naming import group_names, other_names
from lora_jax.layers.placement import fully_sharded, model_mesh, place_of
from lora_jax.layers.sites import Sites, Target, targets_of
from lora_jax.layers.stacked import stack_size
from lora_jax.layers.table import (
    KERNEL_WRAPPER,
    LABELS,
    POOLED,
    WRAPPERS,
    Wrapper,
    wrapper_of,
)
from lora_jax.models.head import TiedHead
from lora_jax.shapes import PROMPTS, TOKENS


def wrap(model: nnx.Module, config: LoRAConfig) -> Sites:
    """Puts LoRA layers with empty slots in the place of the model's layers.

    Args:
      model: any Flax NNX model; changed in place. LoRA layers of an earlier `wrap` are
        taken off first.
      config: `max_lora_rank`, `max_lora_cls_labels`, `target_modules`, `module_names`.
    Returns:
      The sites, their slots still without arrays (`bank.empty_bank` makes them).
    Raises:
      ConfigError: if a target module matches nothing, or what cannot be wrapped; if an
        option is for multimodal models and this is none, or for experts that are
        spread over devices and these are not, or the other way round.
      ModelError: if the model has no layer that can carry LoRA.
    """
    unwrap(model)
    prefixes = getattr(type(model), "lora_domains", {})
    check_multimodal(type(model).__name__, prefixes, config)
    check_spread(model, config)
    mesh = model_mesh(model)
    packed = getattr(type(model), "packed_modules_mapping", {})
    found = [
        _candidate(paths, layer, packed) for paths, layer in _layers_with_paths(model)
    ]
    chosen = [
        candidate
        for candidate in found
        if candidate.shape and _is_wanted(candidate, config.target_modules)
    ]
    _check_targets(config.target_modules, found, chosen)
    if not chosen and config.target_modules is None:
        raise ModelError(
            f"{type(model).__name__} has no layer that can carry LoRA; known types: "
            f"{', '.join(kind.__name__ for kind in WRAPPERS)}."
        )
    layers: dict[str, LoRALayer] = {}
    targets: dict[str, Target] = {}
    routings: dict[tuple[str, int | None], LoRARouting] = {}
    left_out: dict[str, str] = {}
    for candidate in chosen:
        name, layer, row = candidate.paths[0], candidate.layer, candidate.wrapper
        assert candidate.shape is not None  # the chosen ones have shapes
        names = name.split(".")
        layers_stacked = stack_size(layer, candidate.shape.size)
        site = Site(
            name=name,
            kind=row.kind,
            domain=domain_of(
                name, prefixes, TOKENS if POOLED.isdisjoint(names) else PROMPTS
            ),
            shape=candidate.shape,
            max_rank=config.max_lora_rank,
            max_labels=config.max_lora_cls_labels if names[-1] in LABELS else None,
            layers=layers_stacked,
            place=_place(candidate, mesh, layers_stacked, config),
        )
        reached = targets_of(model, site, candidate.paths)
        if is_left_out(site.domain, config):
            left_out |= dict.fromkeys(reached, site.domain)
            continue
        routing = _shared(routings, site.domain, site.layers)
        _set_class(layer, _subclass(row.mixin, type(layer)))
        layer.lora_site = site  # type: ignore[attr-defined]
        slots = LoRASlots(None, **row.mixin.slots_metadata)
        layer.lora_slots = slots  # type: ignore[attr-defined]
        layer.lora_routing = routing  # type: ignore[attr-defined]
        if issubclass(row.mixin, LoRAHead):
            tokens = _shared(routings, TOKENS, None)
            layer.lora_token_routing = tokens  # type: ignore[attr-defined]
        layers[name] = layer  # type: ignore[assignment]
        targets |= reached
    aliases = other_names(targets, config.module_names or {})
    targets |= {name: targets[path] for name, path in aliases.items()}
    tied = (c.paths[0] for c in found if isinstance(c.layer, TiedHead))
    return Sites(layers, targets, routings, next(tied, None), left_out)


def unwrap(model: nnx.Module) -> None:
    """Gives every LoRA layer of `model` its base class back; others stay untouched."""
    for _, layer in _layers_with_paths(model):
        if isinstance(layer, LoRALayer):
            for name in [name for name in vars(layer) if name.startswith("lora_")]:
                delattr(layer, name)
            _set_class(layer, type(layer).__bases__[1])


def _set_class(layer: nnx.Module, kind: type[nnx.Module]) -> None:
    """Plain assignment would enter `__class__` among the module's attributes."""
    object.__setattr__(layer, "__class__", kind)


@functools.cache
def _subclass(mixin: type[LoRALayer], base: type[nnx.Module]) -> type[nnx.Module]:
    """One class object per pair: graph definitions compare classes by identity."""
    name = mixin.__name__ if base is nnx.Linear else f"LoRA{base.__name__}"
    return type(name, (mixin, base), {"__module__": mixin.__module__})


@dataclass(frozen=True)
class _Candidate:
    """A module of the model, and how it could carry LoRA (or why it cannot)."""

    paths: list[str]
    layer: nnx.Module
    wrapper: Wrapper
    shape: Shape | None
    reason: str


def _candidate(
    paths: list[str], layer: nnx.Module, packed: Mapping[str, Sequence[str]]
) -> _Candidate:
    wrapper = wrapper_of(layer, paths[0])
    if wrapper is None:
        reason = "name linear layers."
        return _Candidate(paths, layer, KERNEL_WRAPPER, None, reason)
    try:
        shape = wrapper.describe(layer, paths[0].rpartition(".")[2])
    except ModelError as error:
        return _Candidate(paths, layer, wrapper, None, str(error))
    groups = shape.groups or group_names(shape.parts, packed)
    named = dataclasses.replace(shape, groups=groups)
    return _Candidate(paths, layer, wrapper, named, "")


def _place(
    candidate: _Candidate, mesh: Mesh | None, layers: int | None, config: LoRAConfig
) -> SlotPlace | None:
    """Only slots of linear layers are cut; those of heads are whole on each device."""
    if mesh is None or candidate.shape is None:
        return None
    if candidate.wrapper.mixin is not LoRALinear:
        return SlotPlace(mesh)
    place = place_of(candidate.layer, candidate.shape, mesh, layers=layers)
    if not config.fully_sharded_loras:
        return place
    return fully_sharded(candidate.paths[0], place, candidate.shape, config)


def _layers_with_paths(model: nnx.Module) -> list[tuple[list[str], nnx.Module]]:
    """Every module once, with all the paths that reach it, in the model's order."""
    found: dict[int, tuple[list[str], nnx.Module]] = {}

    def visit(
        module: nnx.Module, path: tuple[str, ...], above: tuple[int, ...]
    ) -> None:
        if id(module) in above:
            return
        if path:
            found.setdefault(id(module), ([], module))[0].append(".".join(path))
        for key, child in nnx.iter_children(module):
            if isinstance(child, nnx.Module):
                visit(child, (*path, str(key)), (*above, id(module)))

    visit(model, (), ())
    return list(found.values())


def _shared(
    routings: dict[tuple[str, int | None], LoRARouting], domain: str, layers: int | None
) -> LoRARouting:
    return routings.setdefault((domain, layers), LoRARouting(None))


def _is_wanted(candidate: _Candidate, target_modules: Sequence[str] | None) -> bool:
    if target_modules is None:
        return True
    return any(_hits(candidate, target) for target in target_modules)


def _hits(candidate: _Candidate, target: str) -> list[str]:
    """Paths that a target names: by a suffix at a dot, whole, or by a fused child."""
    children = candidate.shape.names if candidate.shape else {}
    of_experts = candidate.shape is not None and candidate.shape.experts > 0

    def names(path: str) -> list[str]:
        parent, _, last = path.rpartition(".")
        own = [f".{parent}.{name}" for name in (last, *children)]
        return [*own, f".{parent}"] if of_experts else own

    return [
        path
        for path in candidate.paths
        if any(name.endswith(f".{target}") for name in names(path))
    ]


def _check_targets(
    target_modules: Sequence[str] | None,
    found: list[_Candidate],
    chosen: list[_Candidate],
) -> None:
    problems = []
    for target in target_modules or ():
        hits = [
            (path, candidate)
            for candidate in found
            for path in _hits(candidate, target)
        ]
        problems += [
            f"{path} ({type(candidate.layer).__name__}) matches {target!r} but cannot "
            f"be wrapped by any LoRA layer; {candidate.reason}"
            for path, candidate in hits
            if candidate not in chosen and not _holds_experts(path, chosen)
        ]
        if not hits:
            problems.append(
                f"{target!r} matches no module; layers that can carry LoRA: "
                f"{', '.join(_last_names(found))}."
            )
    if problems:
        raise ConfigError(faults("target_modules cannot be used:", problems))


def _holds_experts(path: str, chosen: list[_Candidate]) -> bool:
    """Whether `experts` itself is named, for the layers inside."""
    return any(
        p.rpartition(".")[0] == path
        for candidate in chosen
        if candidate.shape and candidate.shape.experts
        for p in candidate.paths
    )


def _last_names(found: list[_Candidate]) -> list[str]:
    carriers = [candidate for candidate in found if candidate.shape]
    return sorted({p.rpartition(".")[2] for c in carriers for p in c.paths})
