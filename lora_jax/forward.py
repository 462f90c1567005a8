"""The model as a pure function of (weights, bank, routing, inputs).

    graphdef, weights = split(model)
    logits = forward(graphdef, weights, bank, routing, tokens)

`weights` is everything but slots and routing, so a step that is given a bank and a
routing depends on nothing else; both may be traced, donated, or kept. To call another
method than `__call__`, `merge` first.
"""

from collections.abc import Mapping

import jax
from flax import nnx

from lora_jax.bank import Bank
from lora_jax.layers import LoRALayer, LoRARouting
from lora_jax.layers.head import LoRAHead
from lora_jax.layers.stacked import stacked_routing
from lora_jax.routing import RoutingSet
from lora_jax.shapes import TOKENS


def split(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the static graph and the weights, without slots and routing.

    Args:
      model: a model that a manager has wrapped (`LoRAModelManager(model, config)`).
    Returns:
      `graphdef`: hashable, a static argument of a jitted step.
      `weights`: state of the base model, an ordinary argument.
    """
    held = [
        (variable, variable.get_value())
        for layer in lora_layers(model).values()
        for variable in (layer.lora_slots, *routing_variables(layer).values())
    ]
    install(model, None, {})
    try:
        graphdef, weights = nnx.split(model)
        # The state shares its variables with the model; new ones stay empty when the
        # model's get their slots back.
        return graphdef, jax.tree.map(lambda array: array, weights)
    finally:
        for variable, value in held:
            variable.set_value(value)


def merge(
    graphdef: nnx.GraphDef, weights: nnx.State, bank: Bank, routing: RoutingSet
) -> nnx.Module:
    """Returns the model with the given slots and routing in its layers.

    Args:
      graphdef: from `split`.
      weights: from `split`.
      bank: all slots.
      routing: domain -> routing; `{}` runs the base model, without any LoRA work.
    """
    # New variables: those of a state that a jit closes over cannot be written in it.
    model = nnx.merge(graphdef, jax.tree.map(lambda array: array, weights))
    install(model, bank, routing)
    return model


def forward(
    graphdef: nnx.GraphDef,
    weights: nnx.State,
    bank: Bank,
    routing: RoutingSet,
    *inputs: jax.Array,
) -> jax.Array:
    """Returns `model(*inputs)` under the given slots and routing. Pure."""
    return merge(graphdef, weights, bank, routing)(*inputs)  # type: ignore[operator]


def install(model: nnx.Module, bank: Bank | None, routing: RoutingSet) -> None:
    """Writes slots and routing into the model's layers, so that `model(...)` uses them.

    Only references move; no array is copied. `bank=None` leaves the layers empty.
    """
    for name, layer in lora_layers(model).items():
        layer.lora_slots.set_value(None if bank is None else bank.arrays[name])
        layers = layer.lora_site.layers
        for domain, variable in routing_variables(layer).items():
            variable.set_value(stacked_routing(routing.get(domain), layers))


def routing_variables(layer: LoRALayer) -> dict[str, LoRARouting]:
    """Returns a layer's routing variables by domain; a head has two."""
    own = {layer.lora_site.domain: layer.lora_routing}
    is_head = isinstance(layer, LoRAHead)
    return own | ({TOKENS: layer.lora_token_routing} if is_head else {})


def lora_layers(model: nnx.Module) -> Mapping[str, LoRALayer]:
    """Returns the model's LoRA layers by site name."""
    return {
        module.lora_site.name: module
        for _, module in nnx.iter_modules(model)
        if isinstance(module, LoRALayer)
    }
