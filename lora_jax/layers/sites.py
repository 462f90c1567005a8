"""The LoRA layers of a wrapped model, and every name by which adapters reach one."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flax import nnx

from lora_jax.layers.base import LoRALayer, LoRARouting, PartKey, Site
from lora_jax.layers.stacked import numbered, stacked_prefix, stacked_routing


@dataclass(frozen=True)
class Target:
    """Where an adapter's module lands: in which parts of a site; of a stack of layers,
    in which one."""

    site: str
    part: PartKey
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


def targets_of(model: nnx.Module, site: Site, paths: list[str]) -> dict[str, Target]:
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
    names = site.shape.names
    whole = Target(site.name, None if names else 0)
    reached = dict.fromkeys(paths, whole)
    for path in paths:
        parent = path.rpartition(".")[0]
        for child, key in names.items():
            reached[f"{parent}.{child}" if parent else child] = Target(site.name, key)
    return reached
