"""Layers that are one module with a leading layer axis (`nnx.vmap` + `nnx.scan`).

Such a module is one site whose every array has the layers first: slots are
`(layers, slots, ...)` and the routing is repeated once for each layer, so that a scan
that slices all variables along their first axis hands each layer its own. An adapter
names the layers one by one; the number stands after the name of the stacked module:

    model   decoder.blocks.attn.q_proj            kernel (layers, d_in, d_out)
    names   decoder.blocks.0.attn.q_proj, decoder.blocks.1.attn.q_proj, ...
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.layers.base import HostSlot
from lora_kernels import Routing


def stack_size(layer: nnx.Module, kernel_size: int) -> int | None:
    """Returns how many layers a module's arrays stack, None if it is one layer.

    Args:
      kernel_size: number of weights of one layer's kernel, `d_in * d_out`.
    """
    kernel = vars(layer).get("kernel")
    if not isinstance(kernel, nnx.Param) or math.prod(kernel.shape) == kernel_size:
        return None
    layers = kernel.shape[0]
    return layers if math.prod(kernel.shape[1:]) == kernel_size else None


def stacked_prefix(model: nnx.Module, path: str, layers: int) -> str:
    """Returns the path of the stacked module that holds `path`.

    It is the outermost one whose every parameter has `layers` first.
    """
    names = path.split(".")
    module: nnx.Module = model
    for depth, name in enumerate(names, start=1):
        module = dict(_children(module))[name]
        shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.state(module, nnx.Param))]
        if all(shape and shape[0] == layers for shape in shapes):
            return ".".join(names[:depth])
    return path


def numbered(path: str, prefix: str, layer: int) -> str:
    """Returns a path with the layer's number after the stacked module's name.

    Example:
      >>> numbered("blocks.attn.q_proj", "blocks", 3)
      'blocks.3.attn.q_proj'
    """
    return f"{prefix}.{layer}{path[len(prefix) :]}"


def stack_hosts(packed: Mapping[int, HostSlot], layers: int) -> HostSlot:
    """Returns the host arrays of a stacked site from those of its layers.

    Layers that the adapter leaves alone are zeros, as are the biases and gains that
    only other layers bring; the rest are corners of the rank that the largest has.
    """
    stacked: HostSlot = {}
    for key in dict.fromkeys(key for slot in packed.values() for key in slot):
        arrays = {layer: slot[key] for layer, slot in packed.items() if key in slot}
        shapes = [array.shape for array in arrays.values()]
        corner = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        first = next(iter(arrays.values()))
        stacked[key] = np.zeros((layers, *corner), first.dtype)
        for layer, array in arrays.items():
            stacked[key][(layer, *(slice(size) for size in array.shape))] = array
    return stacked


def stacked_routing(routing: object, layers: int | None) -> object:
    """Returns the value of a routing variable: repeated for each layer of a stack."""
    if layers is None or not isinstance(routing, Routing):
        return routing
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf[None], (layers, *leaf.shape)), routing
    )


def _children(module: nnx.Module) -> list[tuple[str, nnx.Module]]:
    return [(str(key), child) for key, child in nnx.iter_children(module)]
