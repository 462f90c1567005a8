"""A decoder -> the same decoder, its kernels cut over the devices of a mesh.

    model = load_model(folder)
    shard_tensors(model, jax.make_mesh((4,), ("tensor",)))
    manager = LoRAModelManager(model, config)

Kernels that widen (qkv, gate and up) are cut along their outputs, kernels that come
after them (o, down) along their inputs, the embedding and a head of its own along the
vocabulary where it divides; all else is whole on every device. The compiler cuts the
computation accordingly, so results are those of one device up to rounding, whatever the
numbers of heads are: fewer key heads than devices need no copies of them.

Each part of a fused kernel keeps its columns, one part after the other, as checkpoints
and adapters count them; the compiler moves the outputs to where their heads are.
"""

from collections.abc import Iterator, Mapping

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lora_jax.errors import ModelError, faults
from lora_jax.models.causal_lm import CausalLM
from lora_jax.models.expert_mesh import EXPERT_AXIS
from lora_jax.models.experts import Experts
from lora_jax.models.quantize import is_quantized

INPUT, OUTPUT = 0, 1
"""Axes of a kernel."""

CUT_AXES: Mapping[str, int] = {
    "qkv_proj": OUTPUT,
    "o_proj": INPUT,
    "gate_up_proj": OUTPUT,
    "gate_proj": OUTPUT,
    "up_proj": OUTPUT,
    "down_proj": INPUT,
    "c_attn": OUTPUT,
    "c_fc": OUTPUT,
    "c_proj": INPUT,
}
"""Last name of a linear layer -> which axis of its kernel is cut."""


def shard_tensors(model: nnx.Module, mesh: Mesh, axis: str = "tensor") -> None:
    """Cuts a decoder's kernels over a mesh axis, and puts the rest on every device.

    Changes the model in place. Do it before a LoRA manager wraps the model, so that the
    slots are made where their kernels are. Experts must have been spread over another
    axis of the same devices before (`shard_experts`); they stay as they are.

    Args:
      model: a `CausalLM`.
      mesh: the devices. Over its other axes everything is repeated.
      axis: name of the axis to cut over.
    Raises:
      ModelError: naming everything that stands against it; nothing has changed then.

    Example::

        shard_tensors(model, jax.make_mesh((2,), ("tensor",)))
    """
    problems = _faults(model, mesh, axis)
    if problems:
        headline = f"the kernels of {type(model).__name__} cannot be cut:"
        raise ModelError(faults(headline, problems))
    assert isinstance(model, CausalLM), "_faults() refuses others"
    # The axes of `jax.make_mesh` are explicit; see `shard_experts`.
    place = Mesh(mesh.devices, mesh.axis_names)
    cut = {id(variable): spec for variable, spec in _cut_variables(model, place, axis)}
    for _, variable in _variables(model):
        if variable.get_metadata(EXPERT_AXIS, None) is not None:
            continue
        sharding = NamedSharding(place, cut.get(id(variable), PartitionSpec()))
        variable.set_value(jax.device_put(variable.get_value(), sharding))


def _cut_variables(
    model: CausalLM, mesh: Mesh, axis: str
) -> Iterator[tuple[nnx.Variable, PartitionSpec]]:
    for _, name, linear in _cut_linears(model):
        cut = CUT_AXES[name]
        spec = PartitionSpec(axis) if cut == INPUT else PartitionSpec(None, axis)
        yield linear.kernel, spec
        if linear.bias is not None and cut == OUTPUT:
            yield linear.bias, PartitionSpec(axis)
    if model.config.vocab_size % mesh.shape[axis] == 0:
        yield _embed(model).embedding, PartitionSpec(axis)
        if isinstance(model.lm_head, nnx.Linear):
            yield model.lm_head.kernel, PartitionSpec(None, axis)


def _embed(model: CausalLM) -> nnx.Embed:
    return model.model.embed_tokens if model.config.rotaries else model.transformer.wte


def _cut_linears(model: nnx.Module) -> Iterator[tuple[str, str, nnx.Linear]]:
    """Path, last name and layer of each linear layer whose kernel is to be cut."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Linear) and path and path[-1] in CUT_AXES:
            yield ".".join(map(str, path)), str(path[-1]), module


def _faults(model: nnx.Module, mesh: Mesh, axis: str) -> list[str]:
    size = mesh.shape.get(axis)
    problems = []
    if size is None:
        problems.append(f"the mesh has no axis {axis!r}, only {mesh.axis_names}.")
    if not isinstance(model, CausalLM):
        problems.append("it is no decoder of this library; cut its kernels yourself.")
    for path, name, linear in _cut_linears(model):
        if is_quantized(linear):
            problems.append(f"{path}: is quantised; cut kernels of floats only.")
            continue
        width = linear.kernel.shape[CUT_AXES[name]]
        if size is not None and width % size:
            problems.append(
                f"{path}: a width of {width} is no multiple of the {size} devices "
                f"along {axis!r}; take a number that divides it."
            )
    problems += _expert_faults(model, mesh, axis)
    problems += [
        f"{'.'.join(map(str, path))}: is no parameter, so something is laid around the "
        "model already; cut it before a LoRA manager wraps it."
        for path, variable in _variables(model)
        if not isinstance(variable, nnx.Param | nnx.RngState)
    ]
    return problems


def _expert_faults(model: nnx.Module, mesh: Mesh, axis: str) -> list[str]:
    problems = []
    for path, module in nnx.iter_modules(model):
        if not isinstance(module, Experts):
            continue
        place, name = module.expert_mesh, ".".join(map(str, path))
        if place is None:
            problems.append(
                f"{name}: experts are not cut; spread them first, over another axis of "
                "the same mesh (shard_experts)."
            )
        elif place.axis == axis or place.mesh != Mesh(mesh.devices, mesh.axis_names):
            problems.append(
                f"{name}: its experts are spread over {place.axis!r} of {place.mesh}; "
                "take another axis of that mesh."
            )
    return problems


def _variables(model: nnx.Module) -> list[tuple[tuple[object, ...], nnx.Variable]]:
    return [
        (path, node)
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Variable)
    ]
