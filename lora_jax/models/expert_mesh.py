"""Where experts lie that are spread over devices, and a sum over those devices.

A `nnx.Variable` whose metadata have `expert_axis` is cut along that axis: device `i` of
the mesh axis holds the experts from `i * local` on. Everything else is whole on each
device. What a module computes from its own part is summed over the devices. Knows no
module by name.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

EXPERT_AXIS = "expert_axis"
"""Metadata of a variable: which axis of its arrays counts the experts."""


@dataclass(frozen=True)
class ExpertMesh:
    """Devices over which experts are spread.

    Attributes:
      mesh: all devices; arrays may be cut as the compiler likes where nothing is said
        (`AxisType.Auto`).
      axis: name of the mesh axis along which the experts lie; the other axes repeat.
    """

    mesh: Mesh
    axis: str

    @property
    def size(self) -> int:
        """Number of parts into which the experts are cut."""
        return self.mesh.shape[self.axis]

    @property
    def whole(self) -> NamedSharding:
        """Sharding of what every device has whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def spread(self, axis: int) -> NamedSharding:
        """Returns the sharding of an array whose `axis` counts the experts."""
        return NamedSharding(self.mesh, self._spec(axis))

    def sharding_of(self, variable: nnx.Variable) -> NamedSharding:
        """Returns the sharding of a variable, by its metadata."""
        axis = variable.get_metadata(EXPERT_AXIS, None)
        return self.whole if axis is None else self.spread(axis)

    def _spec(self, axis: int) -> PartitionSpec:
        return PartitionSpec(*[None] * axis, self.axis)


Local = Callable[..., Float[Array, "..."]]
"""`(module with the device's own experts, first expert, *inputs) -> partial sum`."""


def sum_over_devices(
    place: ExpertMesh, module: nnx.Module, compute: Local, *inputs: Array
) -> Float[Array, "..."]:
    """Returns the sum of what each device computes from the experts that it holds.

    Works inside and outside `jax.jit`, and under `jax.grad`.

    Args:
      place: where the experts of `module` lie.
      module: its variables tell by `expert_axis` which of them are cut.
      compute: a function of the top level of a file, called once on each device.
      inputs: the same, and whole, on every device.
    """
    graphdef, state = nnx.split(module)
    return _summed(place, graphdef, compute, state, inputs)


# Without jit a call outside jit would run operation by operation on each device.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _summed(
    place: ExpertMesh,
    graphdef: nnx.GraphDef[nnx.Module],
    compute: Local,
    state: nnx.State,
    inputs: tuple[Array, ...],
) -> Array:
    variables, structure = jax.tree.flatten(state, is_leaf=_is_variable)

    def local(variables: list[Any], inputs: tuple[Array, ...]) -> Array:
        own = nnx.merge(graphdef, jax.tree.unflatten(structure, variables))
        part = jax.lax.axis_index(place.axis).astype(jnp.int32)
        return jax.lax.psum(compute(own, part, *inputs), place.axis)

    return jax.shard_map(
        local,
        mesh=place.mesh,
        in_specs=([place.sharding_of(v).spec for v in variables], PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,  # Kernels of other compilers cannot say what varies.
    )(variables, inputs)


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


def own_experts(
    chosen: Int32[Array, "tokens k"], part: Int32[Array, ""], held: int
) -> Int32[Array, "tokens k"]:
    """Returns chosen experts counted from the first that a device holds.

    Those of other devices come out below 0 or from `held` on.

    Args:
      chosen: experts of the whole model.
      part: place of the device along the mesh axis.
      held: number of experts that a device holds.
    """
    return chosen - part * held
