"""The only code that knows how a checkpoint names and stores a layer's tensors.

A module's path here is its path in the checkpoint, so the names follow from the modules
themselves: one row of LAYER_TENSORS for each type of layer says which tensors it has,
in which shape they are stored, and which part of which parameter they fill. Where files
differ in layout a row has several answers, and the file at hand decides.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping

from flax import nnx

from lora_jax.models.attention import Attention
from lora_jax.models.experts import ExpertLinear
from lora_jax.models.linear import Conv1D, FusedLinear
from lora_jax.models.norm import Norm

Path = tuple[object, ...]
"""Attribute names and list indices from the root module downwards."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Where one tensor of a checkpoint goes.

    Attributes:
      path: from the root module to the parameter, as in `nnx.to_flat_state`.
      shape: of the tensor in the file.
      transposed: whether the tensor's last two axes change places in the parameter.
      start: first output column (kernel) or element (bias) of a fused parameter.
      expert: the one that the tensor is for; `None` if it is the whole parameter.
      interleaved: whether the tensor's columns alternate between two parts that the
        parameter holds side by side.
    """

    path: Path
    shape: tuple[int, ...]
    transposed: bool
    start: int
    expert: int | None = None
    interleaved: bool = False


Table = dict[str, Target]


@dataclasses.dataclass(frozen=True)
class Naming:
    """How a checkpoint may spell its tensors otherwise than the model's paths.

    Attributes:
      left_out: prefix that a checkpoint of the body alone leaves out, `"model."`.
      put_before: prefixes that a checkpoint of a larger model puts before.
      tied: tensor -> the one that it must equal if it is in the file at all.
      unused: beginnings of tensors that belong to a head which this model has not.
      renamed: what a name in the file may have -> what the model's path has instead.
    """

    left_out: str
    put_before: tuple[str, ...]
    tied: Mapping[str, str]
    unused: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...] = ()

    def spellings(self, name: str) -> list[str]:
        """Returns the paths that a tensor of the file may mean, the likeliest first."""
        for theirs, ours in self.renamed:
            name = name.replace(theirs, ours)
        shorter = [
            name.removeprefix(prefix)
            for prefix in self.put_before
            if name.startswith(prefix)
        ]
        return [name, self.left_out + name, *shorter]


COMPUTED_SUFFIXES = (
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    "embeddings.position_ids",
)
"""Buffers of old checkpoints that the config gives as well; read and left.

The middle two are GPT-2's causal masks, the last is BERT's; no layer that is built here
has such a parameter.
"""


def checkpoint_table(
    model: nnx.Module, present: Collection[str] = frozenset()
) -> Table:
    """Returns the place of every tensor that a checkpoint of `model` must hold.

    Args:
      model: may be abstract (`nnx.eval_shape`).
      present: names of the file's tensors; of several layouts that a layer may have the
        one is taken that most of them belong to.
    """
    held = frozenset(present)
    table: Table = {}
    for path, module in nnx.iter_modules(model):
        kind = next((kind for kind in LAYER_TENSORS if isinstance(module, kind)), None)
        if kind is not None:
            layouts = [dict(rows(path, module)) for rows in LAYER_TENSORS[kind]]
            table.update(max(layouts, key=lambda layout: len(layout.keys() & held)))
    return table


def tensor_name(path: Path, tensor: str) -> str:
    """Returns the checkpoint's name of a tensor of the module at `path`."""
    return ".".join(map(str, (*path, tensor)))


Rows = Iterator[tuple[str, Target]]


def _fused(path: Path, layer: FusedLinear) -> Rows:
    start = 0
    for part, width in layer.parts:
        child = (*path[:-1], part)
        yield from _linear_rows(path, child, layer, width, start)
        start += width


def _linear(path: Path, layer: nnx.Linear) -> Rows:
    return _linear_rows(path, path, layer, layer.out_features, 0)


def _linear_rows(
    path: Path,
    child: Path,
    layer: nnx.Linear | ExpertLinear,
    width: int,
    start: int,
) -> Rows:
    """Gives the tensors of one child; torch keeps the transpose of our kernels."""
    shape = (width, layer.in_features)
    kernel = Target((*path, "kernel"), shape, True, start)
    yield tensor_name(child, "weight"), kernel
    if layer.use_bias:
        bias = Target((*path, "bias"), (width,), False, start)
        yield tensor_name(child, "bias"), bias


def _conv1d(path: Path, layer: Conv1D) -> Rows:
    shape = (layer.in_features, layer.out_features)
    yield tensor_name(path, "weight"), Target((*path, "kernel"), shape, False, 0)
    yield tensor_name(path, "bias"), Target((*path, "bias"), shape[1:], False, 0)


def _embed(path: Path, layer: nnx.Embed) -> Rows:
    shape = (layer.num_embeddings, layer.features)
    yield tensor_name(path, "weight"), Target((*path, "embedding"), shape, False, 0)


def _norm(path: Path, layer: Norm) -> Rows:
    for parameter, tensor in (("scale", "weight"), ("bias", "bias")):
        variable = vars(layer).get(parameter)
        if variable is not None:
            target = Target((*path, parameter), variable.shape, False, 0)
            yield tensor_name(path, tensor), target


def _sinks(path: Path, layer: Attention) -> Rows:
    if layer.sinks is not None:
        target = Target((*path, "sinks"), (layer.heads,), False, 0)
        yield tensor_name(path, "sinks"), target


def _experts_in_one(path: Path, layer: ExpertLinear) -> Rows:
    """Gives the tensors of all experts together: transformers 5, and gpt-oss always."""
    shape = (layer.num_experts, layer.in_features, layer.out_features)
    kept = layer.stored_in_out
    stored = shape if kept else (shape[0], shape[2], shape[1])
    name, mixed = tensor_name(path[:-1], layer.fused_name), layer.interleaved
    kernel = Target((*path, "kernel"), stored, not kept, 0, interleaved=mixed)
    yield name, kernel
    if layer.use_bias:
        bias = Target((*path, "bias"), shape[::2], False, 0, interleaved=mixed)
        yield f"{name}_bias", bias


def _experts_one_by_one(path: Path, layer: ExpertLinear, *, spelling: int) -> Rows:
    """Gives the tensors of each expert: transformers 4."""
    for expert in range(layer.num_experts):
        start = 0
        for (_, width), names in zip(layer.parts, layer.expert_names, strict=True):
            child = (*path[:-1], expert, names[min(spelling, len(names) - 1)])
            rows = _linear_rows(path, child, layer, width, start)
            for name, target in rows:
                yield name, dataclasses.replace(target, expert=expert)
            start += width


LAYER_TENSORS: Mapping[type[nnx.Module], tuple[Callable[..., Rows], ...]] = {
    FusedLinear: (_fused,),
    Conv1D: (_conv1d,),
    nnx.Linear: (_linear,),
    nnx.Embed: (_embed,),
    Norm: (_norm,),
    Attention: (_sinks,),
    ExpertLinear: (
        _experts_in_one,
        functools.partial(_experts_one_by_one, spelling=0),
        functools.partial(_experts_one_by_one, spelling=1),
    ),
}
"""The layouts of each type of layer; the first type that a layer is of decides."""
