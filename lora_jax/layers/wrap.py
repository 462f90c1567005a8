"""Finds the layers of a model that can carry LoRA and puts a LoRA layer in their place.

`wrap` exchanges the *class* of each such layer for a subclass of it (Penzai's and qwix'
surgery, without new objects): one object reached by two paths is wrapped once. Which
base layers can be wrapped is the WRAPPERS table; a subclass of a row's type counts as
that type, and its own forward is kept.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flax import nnx

from lora_jax.config import LoRAConfig
from lora_jax.errors import ConfigError, ModelError, faults
from lora_jax.layers.base import LoRALayer, LoRARouting, LoRASlots, Shape, Site
from lora_jax.layers.classifier import LoRAClassifier
from lora_jax.layers.domains import check_multimodal, domain_of, is_left_out
from lora_jax.layers.einsum import describe_einsum, describe_general
from lora_jax.layers.embed import LoRAEmbed, describe_embed
from lora_jax.layers.head import LoRAHead
from lora_jax.layers.linear import (
    LoRALinear,
    describe_fused,
    describe_kernel,
    describe_linear,
)
from lora_jax.layers.naming import other_names
from lora_jax.layers.stacked import (
    numbered,
    stack_size,
    stacked_prefix,
    stacked_routing,
)
from lora_jax.models.head import TiedHead
from lora_jax.models.linear import FusedLinear
from lora_jax.shapes import PROMPTS, TOKENS


@dataclass(frozen=True)
class Wrapper:
    """One row of WRAPPERS: how a base layer type becomes a LoRA layer.

    Attributes:
      kind: name for reports.
      mixin: the LoRA layer, to be placed before the base type.
      describe: widths, parts and axes of a base layer, given its own last name; raises
        ModelError if this one layer cannot carry LoRA.
    """

    kind: str
    mixin: type[LoRALayer]
    describe: Callable[..., Shape]


WRAPPERS: Mapping[type[nnx.Module], Wrapper] = {
    TiedHead: Wrapper("head", LoRAHead, describe_linear),
    FusedLinear: Wrapper("fused", LoRALinear, describe_fused),
    nnx.Linear: Wrapper("linear", LoRALinear, describe_linear),
    nnx.LinearGeneral: Wrapper("linear", LoRALinear, describe_general),
    nnx.Einsum: Wrapper("einsum", LoRALinear, describe_einsum),
    nnx.Embed: Wrapper("embed", LoRAEmbed, describe_embed),
}
"""Most special type first: the first row that the layer is an instance of decides."""

KERNEL_WRAPPER = Wrapper("kernel", LoRALinear, describe_kernel)
"""For callable layers of other people that hold a 2-D `kernel` `(d_in, d_out)`."""

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings")
"""Last names of embeddings whose rows are tokens; others (positions, types) are not."""

HEAD_WRAPPERS: Mapping[str, Wrapper] = {
    "lm_head": Wrapper("head", LoRAHead, describe_linear),
    "score": Wrapper("classifier", LoRAClassifier, describe_linear),
    "classifier": Wrapper("classifier", LoRAClassifier, describe_linear),
}
"""Last name of a linear layer that is a head -> its row: its rows are one for each
sampled token or pooled prompt, not one for each token."""


@dataclass(frozen=True)
class Target:
    """Where an adapter's module lands: a part of a site, or (None) all its parts; of a
    stack of layers, in which one."""

    site: str
    part: int | None
    layer: int | None = None


@dataclass(frozen=True)
class Sites(Mapping[str, LoRALayer]):
    """The LoRA layers of a model by module path, and every name that reaches them.

    Attributes:
      layers: site name -> layer, in the order of the model.
      targets: every module path by which an adapter may name a site or a part.
      routings: (domain, layers of a stack or None) -> the routing variable that such
        layers share.
      tied_head: name of the head whose weights are the embedding table, if there is
        one; it need not be a site.
      left_out: names that adapters may hold but that the options leave alone -> their
        domain ("tower", "connector").
    """

    layers: dict[str, LoRALayer]
    targets: dict[str, Target] = field(repr=False)
    routings: dict[tuple[str, int | None], LoRARouting] = field(repr=False)
    tied_head: str | None = None
    left_out: dict[str, str] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> LoRALayer:
        """Returns the layer of a site."""
        return self.layers[name]

    def __iter__(self) -> Iterator[str]:
        """Iterates over site names, in the order of the model."""
        return iter(self.layers)

    def __len__(self) -> int:
        """Returns the number of LoRA layers."""
        return len(self.layers)

    def show_routing(self, domain: str, routing: object) -> None:
        """Makes `routing` (or None) what the layers of a domain see."""
        for (own, layers), variable in self.routings.items():
            if own == domain:
                variable.set_value(stacked_routing(routing, layers))


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
        option is for multimodal models and this is none.
      ModelError: if the model has no layer that can carry LoRA.
    """
    unwrap(model)
    prefixes = getattr(type(model), "lora_domains", {})
    check_multimodal(type(model).__name__, prefixes, config)
    packed = getattr(type(model), "packed_modules_mapping", {})
    found = [_candidate(paths, layer) for paths, layer in _layers_with_paths(model)]
    chosen = [
        candidate
        for candidate in found
        if candidate.shape and _is_wanted(candidate, config.target_modules, packed)
    ]
    _check_targets(config.target_modules, found, chosen, packed)
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
        is_head = issubclass(row.mixin, LoRAHead | LoRAClassifier)
        site = Site(
            name=name,
            kind=row.kind,
            domain=domain_of(name, prefixes, PROMPTS if is_head else TOKENS),
            shape=candidate.shape,
            max_rank=config.max_lora_rank,
            max_labels=config.max_lora_cls_labels,
            layers=stack_size(layer, candidate.shape.size),
        )
        reached = _targets(model, site, candidate.paths)
        if is_left_out(site.domain, config):
            left_out |= dict.fromkeys(reached, site.domain)
            continue
        routing = _shared(routings, site.domain, site.layers)
        _set_class(layer, _subclass(row.mixin, type(layer)))
        layer.lora_site = site  # type: ignore[attr-defined]
        layer.lora_slots = LoRASlots(None)  # type: ignore[attr-defined]
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


def _candidate(paths: list[str], layer: nnx.Module) -> _Candidate:
    wrapper = _wrapper(layer, paths[0])
    if wrapper is None:
        reason = "name linear layers."
        return _Candidate(paths, layer, KERNEL_WRAPPER, None, reason)
    try:
        shape = wrapper.describe(layer, paths[0].rpartition(".")[2])
    except ModelError as error:
        return _Candidate(paths, layer, wrapper, None, str(error))
    return _Candidate(paths, layer, wrapper, shape, "")


def _wrapper(layer: nnx.Module, name: str) -> Wrapper | None:
    row = next((row for kind, row in WRAPPERS.items() if isinstance(layer, kind)), None)
    if row is not None:
        last = name.rpartition(".")[2]
        if row.mixin is LoRAEmbed and last not in EMBEDDINGS:
            return None
        return HEAD_WRAPPERS.get(last, row) if row.mixin is LoRALinear else row
    kernel = vars(layer).get("kernel")
    known_by_kernel = isinstance(kernel, nnx.Param) and len(kernel.shape) == 2
    return KERNEL_WRAPPER if known_by_kernel and callable(layer) else None


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


def _targets(model: nnx.Module, site: Site, paths: list[str]) -> dict[str, Target]:
    """Every name of a site and its parts; of a stack, those of each layer."""
    reached = _one_layer(site, paths)
    if site.layers is None:
        return reached
    prefix = stacked_prefix(model, site.name, site.layers)
    return {
        numbered(name, prefix, layer): dataclasses.replace(target, layer=layer)
        for name, target in reached.items()
        if name.startswith(prefix)
        for layer in range(site.layers)
    }


def _one_layer(site: Site, paths: list[str]) -> dict[str, Target]:
    if len(site.parts) == 1:
        return {path: Target(site.name, 0) for path in paths}
    reached = {path: Target(site.name, None) for path in paths}
    for path in paths:
        parent = path.rpartition(".")[0]
        for part, (child, _) in enumerate(site.parts):
            reached[f"{parent}.{child}" if parent else child] = Target(site.name, part)
    return reached


def _is_wanted(
    candidate: _Candidate,
    target_modules: Sequence[str] | None,
    packed: Mapping[str, tuple[str, ...]],
) -> bool:
    if target_modules is None:
        return True
    return any(
        _matches(path, target, packed)
        for path in candidate.paths
        for target in target_modules
    )


def _matches(path: str, target: str, packed: Mapping[str, tuple[str, ...]]) -> bool:
    """A target is a suffix at a dot, a full path, or the packed child of a layer."""
    parent, _, last = path.rpartition(".")
    names = [last, *packed.get(last, ())]
    spellings = [f"{parent}.{name}" if parent else name for name in names]
    return any(("." + spelling).endswith("." + target) for spelling in spellings)


def _check_targets(
    target_modules: Sequence[str] | None,
    found: list[_Candidate],
    chosen: list[_Candidate],
    packed: Mapping[str, tuple[str, ...]],
) -> None:
    problems = []
    for target in target_modules or ():
        hits = [
            (path, candidate)
            for candidate in found
            for path in candidate.paths
            if _matches(path, target, packed)
        ]
        problems += [
            f"{path} ({type(candidate.layer).__name__}) matches {target!r} but cannot "
            f"be wrapped by any LoRA layer; {candidate.reason}"
            for path, candidate in hits
            if candidate not in chosen
        ]
        if not hits:
            problems.append(
                f"{target!r} matches no module; layers that can carry LoRA: "
                f"{', '.join(_last_names(found))}."
            )
    if problems:
        raise ConfigError(faults("target_modules cannot be used:", problems))


def _last_names(found: list[_Candidate]) -> list[str]:
    carriers = [candidate for candidate in found if candidate.shape]
    return sorted({p.rpartition(".")[2] for c in carriers for p in c.paths})
