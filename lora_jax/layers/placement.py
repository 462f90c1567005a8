"""Where a layer's slots and output lie on several devices, read off its base kernel.

A kernel `(d_in, d_out)` whose axes are cut over mesh axes `i` and `o` (both may be
absent) has the slots

                         a (parts, rank, d_in)    b (rank, d_out)    bias, gain (d_out)
    as the kernel        (-, -, i)                (-, o)             (o)
    fully sharded        (-, o, i)                (-, o or i)        (o)

so A is cut where the layer's input is, and B where its output is. `scale` and `rank`
are on every device, as is everything of a kernel that is whole, of embeddings, of heads
and of experts (their own axis aside), if the model lies on a mesh at all.

A kernel of several input or output axes is flattened: it counts as cut if the first of
those axes is, and none of the others. Everything else is whole.
"""

import math

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lora_jax.config import LoRAConfig
from lora_jax.errors import ConfigError, ModelError
from lora_jax.layers.base import Shape, Site, SlotPlace
from lora_jax.layers.extras import BIAS, GAIN
from lora_jax.layers.sites import Sites

MeshAxes = str | tuple[str, ...] | None
"""Mesh axes over which one axis of an array is cut, None: whole."""


def model_mesh(model: nnx.Module) -> Mesh | None:
    """Returns the mesh on which a model's parameters lie, None if on one device.

    Raises:
      ModelError: if they lie on several meshes.
    """
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    shardings = [s for s in map(_sharding, leaves) if s is not None]
    found = dict.fromkeys(s.mesh for s in shardings if isinstance(s.mesh, Mesh))
    if len(found) > 1:
        raise ModelError(
            f"the parameters of {type(model).__name__} lie on {len(found)} meshes: "
            f"{', '.join(map(str, found))}; put all of them on one."
        )
    return next(iter(found), None)


def place_of(
    layer: nnx.Module, shape: Shape, mesh: Mesh, *, layers: int | None
) -> SlotPlace:
    """Returns where a linear layer's slots lie.

    Args:
      layer: the base layer.
      shape: of the layer.
      mesh: where the model lies.
      layers: number of layers that it stacks, if it is a stack.
    Raises:
      ModelError: if the kernel is cut over mesh axes that are not `AxisType.Auto`.
    """
    inputs, outputs = _kernel_cuts(layer, shape, layers)
    named = {name for axes in (inputs, outputs) for name in _names(axes)}
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = sorted(name for name in named if kinds[name] is not AxisType.Auto)
    if explicit:
        raise ModelError(
            f"a kernel is cut over the mesh axes {explicit}, whose type is not "
            "AxisType.Auto; build the mesh with axis_types=(AxisType.Auto,) * "
            f"{len(mesh.axis_names)}."
        )
    return SlotPlace(mesh, inputs, outputs)


def fully_sharded(
    name: str, place: SlotPlace, shape: Shape, config: LoRAConfig
) -> SlotPlace:
    """Returns a place that also cuts A's rank, or B's output where the base's is whole.

    Raises:
      ConfigError: if `max_lora_rank` is no multiple of the devices.
    """
    parts = axes_size(place.mesh, place.outputs)
    if config.max_lora_rank % parts:
        raise ConfigError(
            f"{name}: fully_sharded_loras=True cuts the rank over {parts} devices "
            f"(mesh axis {place.outputs!r}), so max_lora_rank must be a multiple of "
            f"{parts}, got {config.max_lora_rank}."
        )
    d_out = sum(width for _, width in shape.parts)
    divides = d_out % axes_size(place.mesh, place.inputs) == 0
    wide = place.outputs or (place.inputs if divides else None)
    return SlotPlace(
        place.mesh, place.inputs, place.outputs, rank=place.outputs, b_outputs=wide
    )


def slot_cuts(place: SlotPlace, layers: int | None) -> dict[str, PartitionSpec]:
    """Returns array name -> spec of one slot, of the arrays that are cut."""
    wide = place.b_outputs or place.outputs
    axes = {
        "a": (None, place.rank, place.inputs),
        "b": (None, wide),
        BIAS: (place.outputs,),
        GAIN: (place.outputs,),
    }
    stack = () if layers is None else (None,)
    return {
        key: PartitionSpec(*stack, *_without_tail(spec))
        for key, spec in axes.items()
        if any(spec)
    }


def implementation_of(site: Site) -> str | None:
    """Returns what computes a layer's update; None: the fastest that accepts.

    A kernel of another compiler is a custom call, which cannot be cut over devices: all
    of its operands would be gathered on each first.
    """
    return "xla_partitioned" if site.place and site.place.is_cut else None


def cut_as_base(site: Site, outputs: jax.Array, updated: jax.Array) -> jax.Array:
    """Returns a layer's updated output, cut where the base layer's output is.

    Otherwise fully sharded slots would cut what comes after the layer too, which then
    rounds otherwise, also in base rows.
    """
    if site.place is None or not site.place.is_cut:
        return updated
    if not isinstance(updated, Tracer):
        return jax.device_put(updated, outputs.sharding)
    cuts: list[object] = [PartitionSpec.UNCONSTRAINED] * updated.ndim
    for number, axis in enumerate(site.shape.out_axes):
        cuts[axis] = None if number else site.place.outputs
    place = NamedSharding(site.place.mesh, PartitionSpec(*cuts))
    return jax.lax.with_sharding_constraint(updated, place)


def rank_multiple(sites: Sites) -> int:
    """Returns of what the rank of an adapter is a multiple if devices share it evenly.

    It divides `max_lora_rank`; 1 where the rank is not cut.
    """
    places = [layer.lora_site.place for layer in sites.values()]
    return math.lcm(*(axes_size(p.mesh, p.rank) for p in places if p is not None))


def axes_size(mesh: Mesh, axes: MeshAxes) -> int:
    """Returns over how many devices an axis is cut."""
    return math.prod(mesh.shape[name] for name in _names(axes))


def _without_tail(spec: tuple[MeshAxes, ...]) -> tuple[MeshAxes, ...]:
    """As jit returns it: a spec that means the same but differs compiles again."""
    last = max(number for number, axes in enumerate(spec) if axes)
    return spec[: last + 1]


def _kernel_cuts(
    layer: nnx.Module, shape: Shape, layers: int | None
) -> tuple[MeshAxes, MeshAxes]:
    kernel = vars(layer).get("kernel")
    sharding = _sharding(kernel.get_value()) if isinstance(kernel, nnx.Param) else None
    if sharding is None or kernel is None:
        return None, None
    first = 0 if layers is None else 1
    padded = (*sharding.spec, *[None] * (kernel.ndim - len(sharding.spec)))[first:]
    order = shape.kernel_axes or tuple(range(len(padded)))
    inputs = [padded[axis] for axis in order[: len(shape.in_axes)]]
    outputs = [padded[axis] for axis in order[len(shape.in_axes) :]]
    return _flattened(inputs), _flattened(outputs)


def _flattened(cuts: list[MeshAxes]) -> MeshAxes:
    """Rows of a flattened axis lie together only if the first of its axes is cut."""
    return None if any(cuts[1:]) else cuts[0]


def _sharding(value: object) -> NamedSharding | None:
    if isinstance(value, Tracer):
        return None  # What is traced may lie anywhere.
    sharding = getattr(value, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _names(axes: MeshAxes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())
