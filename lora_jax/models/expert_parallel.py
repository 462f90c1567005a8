"""A model with experts -> the same model, its experts spread over devices.

    model = load_model(folder)
    shard_experts(model, jax.make_mesh((4,), ("expert",)))
    manager = LoRAModelManager(model, config)

Each device then holds the kernels of its own experts, and the LoRA slots for them; all
else is whole on every device, and so are tokens. Device `i` of the axis has the experts
from `i * experts / devices` on, as vLLM's linear placement.
"""

from collections.abc import Sequence

import jax
from flax import nnx
from jax.sharding import Mesh

from lora_jax.errors import ModelError, faults
from lora_jax.models.expert_mesh import EXPERT_AXIS, ExpertMesh
from lora_jax.models.experts import ExpertLinear, Experts


def shard_experts(model: nnx.Module, mesh: Mesh, axis: str = "expert") -> None:
    """Spreads a model's experts over a mesh axis, and puts the rest on every device.

    Changes the model in place. Do it before a LoRA manager wraps the model, so that the
    slots are made where their experts are.

    Args:
      model: a model whose blocks hold `Experts`.
      mesh: the devices. Over its other axes everything is repeated.
      axis: name of the axis to spread the experts over.
    Raises:
      ModelError: naming everything that stands against it; nothing has changed then.

    Example::

        shard_experts(model, jax.make_mesh((2,), ("expert",)))
    """
    found = [m for _, m in nnx.iter_modules(model) if isinstance(m, Experts)]
    problems = _faults(model, mesh, axis)
    if problems:
        headline = f"the experts of {type(model).__name__} cannot be spread:"
        raise ModelError(faults(headline, problems))
    # The axes of `jax.make_mesh` are explicit: every operation would have to say how
    # its output is cut, which models written for one device do not.
    place = ExpertMesh(Mesh(mesh.devices, mesh.axis_names), axis)
    for experts in found:
        for module in (experts, *_linears(experts)):
            module.expert_mesh = place
    for _, variable in _variables(model):
        value = variable.get_value()
        variable.set_value(jax.device_put(value, place.sharding_of(variable)))


def local_experts(model: nnx.Module) -> range | None:
    """Returns which experts the devices of this process hold; None: all of them.

    None too where layers differ in it, as with other numbers of experts.
    """
    modules = (m for _, m in nnx.iter_modules(model) if isinstance(m, Experts))
    held = {
        None
        if experts.expert_mesh is None
        else process_experts(experts.expert_mesh, experts.num_experts)
        for experts in modules
    }
    return held.pop() if len(held) == 1 else None


def process_experts(place: ExpertMesh, num_experts: int) -> range | None:
    """Returns which experts this process holds of those spread; None: all."""
    axis = place.mesh.axis_names.index(place.axis)
    here = jax.process_index()
    parts = place.mesh.devices.swapaxes(0, axis).reshape(place.size, -1)
    is_local = [any(device.process_index == here for device in part) for part in parts]
    return held_experts(is_local, num_experts)


def held_experts(is_local: Sequence[bool], num_experts: int) -> range | None:
    """Returns the experts of the parts that are local, and those between; None: all.

    Args:
      is_local: of each part along the mesh axis whether this process has it.
      num_experts: experts of all parts.

    Example:
      >>> held_experts([False, True], 8)
      range(4, 8)
    """
    if all(is_local):
        return None
    each = num_experts // len(is_local)
    parts = [part for part, local in enumerate(is_local) if local]
    if not parts:
        return range(0)
    return range(parts[0] * each, (parts[-1] + 1) * each)


def _faults(model: nnx.Module, mesh: Mesh, axis: str) -> list[str]:
    modules = [(_dotted(path), m) for path, m in nnx.iter_modules(model)]
    found = {path: m for path, m in modules if isinstance(m, Experts)}
    problems = []
    size = mesh.shape.get(axis)
    if size is None:
        problems.append(f"the mesh has no axis {axis!r}, only {mesh.axis_names}.")
    if not found:
        problems.append("the model has no experts.")
    for path, experts in found.items():
        if size is not None and experts.num_experts % size:
            problems.append(
                f"{path}: {experts.num_experts} experts are no multiple of the {size} "
                f"devices along {axis!r}; take a number that divides them."
            )
        if any(linear.kernel.ndim != 3 for linear in _linears(experts)):
            problems.append(f"{path}: stacks several layers; unstack them.")
    problems += [
        f"{_dotted(path)}: is no parameter, so something is laid around the experts "
        "already; spread them before a LoRA manager wraps the model."
        for path, variable in _variables(model)
        if variable.get_metadata(EXPERT_AXIS, None) is not None
        and not isinstance(variable, nnx.Param)
    ]
    return problems


def _linears(experts: Experts) -> list[ExpertLinear]:
    first = experts.gate_up_proj if experts.gated else experts.up_proj
    return [first, experts.down_proj]


def _variables(model: nnx.Module) -> list[tuple[tuple[object, ...], nnx.Variable]]:
    return [
        (path, node)
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Variable)
    ]


def _dotted(path: Sequence[object]) -> str:
    return ".".join(map(str, path))
