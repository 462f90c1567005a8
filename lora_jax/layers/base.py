"""What every LoRA layer is: a base layer in its own place, with slots and routing.

A LoRA layer is the *same object* as the base layer, its class exchanged for a subclass
(`wrap.py`): parameter paths, `isinstance`, aliases and attributes that a model reads
stay as they are. The subclass adds two variables, neither of them an `nnx.Param`, so
checkpoints and optimizers of the base model do not see them.

Knows nothing of adapters on disk, of who sits in which slot, or of the batch's origin.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from lora_jax.adapters import AdapterPart

SlotSpec = dict[str, jax.ShapeDtypeStruct]
"""Array name -> shape and dtype of *one* slot (no slot axis), with a sharding where the
first axis is of experts that are spread over devices."""

HostSlot = dict[str, np.ndarray]
"""Array name -> host values of one slot; each the corner of its `SlotSpec` shape, the
rest being zeros."""


PartKey = int | tuple[int, ...] | None
"""What of a site a module of an adapter adapts: one part by number, several parts, or
all of it. Only the layer itself reads it."""


def zero(*shape: int) -> np.ndarray:
    """Returns zeros that take no memory."""
    return np.broadcast_to(np.float32(0), shape)


class LoRASlots(nnx.Variable):
    """All slots of one layer: `{array name: (slots, *slot shape)}`."""


class LoRARouting(nnx.Variable):
    """The batch's `lora_kernels.Routing` of one domain, shared by its layers.

    `None` means that no row has an adapter: the layer is then exactly its base layer.
    """


@dataclass(frozen=True)
class Shape:
    """How a base layer's arrays become rows of `(d_in)` and `(d_out)`.

    Attributes:
      d_in: input width, the product of the contracted axes.
      parts: `(name, output width)` of each packed child, in output order.
      in_axes, out_axes: negative axes of inputs and outputs that make up one row's
        width, in the order in which a PEFT pair flattens them; the other axes count
        the rows, in the same order in inputs and outputs.
      kernel_axes: the base kernel's axes in the order of the input's, then the
        output's; None: they stand in that order.
      groups: `(name, parts)` of each further name for some of the parts.
      experts: how many such layers the module holds, one for each expert; its parts
        are then named by `groups` alone.
    """

    d_in: int
    parts: tuple[tuple[str, int], ...]
    in_axes: tuple[int, ...] = (-1,)
    out_axes: tuple[int, ...] = (-1,)
    kernel_axes: tuple[int, ...] | None = None
    groups: tuple[tuple[str, PartKey], ...] = ()
    experts: int = 0

    @property
    def kernel_in_order(self) -> bool:
        """Whether the base kernel is `(d_in, d_out)` when flattened."""
        return self.kernel_axes is None

    @property
    def size(self) -> int:
        """Number of weights of the layer's kernel."""
        one = self.d_in * sum(width for _, width in self.parts)
        return max(self.experts, 1) * one

    @property
    def names(self) -> dict[str, PartKey]:
        """The parts by every name that stands in the place of the layer's own."""
        if self.experts:
            return dict(self.groups)
        if len(self.parts) == 1:
            return {}
        children = {child: part for part, (child, _) in enumerate(self.parts)}
        return {**dict(self.groups), **children}


@dataclass(frozen=True)
class SlotPlace:
    """On which devices the slots of a layer lie (`placement.py`).

    Attributes:
      mesh: all devices of the model.
      inputs, outputs: mesh axes over which the base kernel's input and output are cut,
        and the slots with them; None: whole.
      rank, b_outputs: mesh axes that cut the rank of A and the output of B as well.
    """

    mesh: Mesh
    inputs: str | tuple[str, ...] | None = None
    outputs: str | tuple[str, ...] | None = None
    rank: str | tuple[str, ...] | None = None
    b_outputs: str | tuple[str, ...] | None = None

    @property
    def is_cut(self) -> bool:
        """Whether a device holds a part of the slots only."""
        return bool(self.inputs or self.outputs)


@dataclass(frozen=True)
class Site:
    """Static facts of one LoRA layer.

    Attributes:
      name: module path, as in the Hugging Face model ("model.layers.0.mlp.down_proj").
      kind: row of the WRAPPERS table, for reports ("linear").
      domain: whose rows the layer sees, one of `lora_jax.shapes.DOMAINS`.
      shape: widths, parts, and which axes make a row; a plain layer has one part that
        bears the layer's own last name.
      max_rank: largest rank that a slot can hold.
      max_labels: most labels of an adapter's own classification head, None: as many as
        the base head has.
      layers: how many layers this one module stacks, None if it is one layer.
      place: where the slots lie; None: the model is not on a mesh.
    """

    name: str
    kind: str
    domain: str
    shape: Shape
    max_rank: int
    max_labels: int | None = None
    layers: int | None = None
    place: SlotPlace | None = None

    @property
    def d_in(self) -> int:
        """Input width."""
        return self.shape.d_in

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """`(name, output width)` of each packed child, in output order."""
        return self.shape.parts

    @property
    def d_out(self) -> int:
        """Output width: the sum over the parts."""
        return sum(width for _, width in self.parts)

    @property
    def part_widths(self) -> tuple[int, ...]:
        """Output width of each part."""
        return tuple(width for _, width in self.parts)


class LoRALayer(nnx.Module):
    """The interface that every kind of LoRA layer implements; a mixin, placed first.

    It derives from `nnx.Module` because CPython exchanges an object's class only for
    one of the same storage layout.

    Attributes:
      lora_site: static facts.
      lora_slots: all slots of this layer.
      lora_routing: the batch's routing, one object per domain.
    """

    lora_site: Site
    lora_slots: LoRASlots
    lora_routing: LoRARouting
    slots_metadata: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Metadata of the slots' variable, for whoever cuts a model's variables."""

    def slot_spec(self, dtype: jax.typing.DTypeLike) -> SlotSpec:
        """Returns shapes and dtypes of one slot whose factors are held in `dtype`."""
        raise NotImplementedError

    def extra_spec(self, key: str, values: np.ndarray) -> SlotSpec:
        """Returns `{key: spec}` of an array that only some adapters bring.

        Args:
          key: its name.
          values: what an adapter brings, the corner of the spec.
        Returns:
          `{}` if this layer has no such array.
        """
        raise NotImplementedError

    def faults(self, part: PartKey, weights: AdapterPart) -> list[str]:
        """Returns why `weights` cannot sit at `part`."""
        raise NotImplementedError

    @property
    def held_experts(self) -> range:
        """Experts of which this process keeps copies; none if the layer has none."""
        return range(0)

    def zeros(self, part: PartKey, rank: int) -> AdapterPart | None:
        """Returns an update of zeros, in views that take no memory.

        None if the layer takes no low-rank update at `part`, or one for more than it.
        """
        raise NotImplementedError

    def overlap(self, first: PartKey, second: PartKey) -> bool:
        """Says whether two parts share a place, so that only one can be adapted."""
        raise NotImplementedError

    def pack(
        self,
        weights: Mapping[PartKey, AdapterPart],
        dtype: np.dtype,
        *,
        layer: int | None = None,
    ) -> HostSlot:
        """Returns the host arrays of one slot; `faults` has found nothing before.

        Args:
          weights: what the adapter has for the site, by part.
          dtype: of the factors.
          layer: which layer of a stack; the arrays have no layer axis either way.
        """
        raise NotImplementedError
