"""Which axes of `nnx.Einsum` and `nnx.LinearGeneral` a PEFT pair speaks of.

A PEFT pair is always 2-D: A flattens the contracted axes, B the kernel's other axes.
The LoRA layer itself is `LoRALinear`; only the `Shape` differs.
"""

import math

from flax import nnx

from lora_jax.errors import ModelError
from lora_jax.layers.base import Shape


def describe_einsum(layer: nnx.Einsum, name: str) -> Shape:
    """Returns the shape of an `nnx.Einsum`.

    Example:
      >>> from flax import nnx
      >>> layer = nnx.Einsum("BTD,DNH->BTNH", (6, 2, 4), rngs=nnx.Rngs(0))
      >>> shape = describe_einsum(layer, "q_proj")
      >>> shape.d_in, shape.parts, shape.in_axes, shape.out_axes
      (6, (('q_proj', 8),), (-1,), (-2, -1))
    """
    inputs, kernel, outputs = _labels(layer.einsum_str)
    sizes = dict(zip(kernel, layer.kernel_shape, strict=True))
    contracted = [label for label in kernel if label not in outputs]
    made = [label for label in kernel if label in outputs]
    rows_in = [label for label in inputs if label not in contracted]
    rows_out = [label for label in outputs if label not in made]
    if not set(contracted) <= set(inputs) or rows_in != rows_out or not made:
        raise ModelError(
            f"{name}: {layer.einsum_str!r} is no linear layer over rows (an axis of "
            "the kernel is also one of the rows, or the rows change their order)."
        )
    return Shape(
        d_in=math.prod(sizes[label] for label in contracted),
        parts=((name, math.prod(sizes[label] for label in made)),),
        in_axes=tuple(inputs.index(label) - len(inputs) for label in contracted),
        out_axes=tuple(outputs.index(label) - len(outputs) for label in made),
        kernel_axes=_moved(kernel, [*contracted, *made]),
    )


def describe_general(layer: nnx.LinearGeneral, name: str) -> Shape:
    """Returns the shape of an `nnx.LinearGeneral` that contracts its last axes.

    Example:
      >>> from flax import nnx
      >>> layer = nnx.LinearGeneral((2, 4), 6, axis=(-2, -1), rngs=nnx.Rngs(0))
      >>> shape = describe_general(layer, "out")
      >>> shape.d_in, shape.parts, shape.in_axes, shape.out_axes
      (8, (('out', 6),), (-2, -1), (-1,))
    """
    axes = tuple(layer.axis)
    if layer.batch_axis or sorted(axes) != list(range(-len(axes), 0)):
        raise ModelError(
            f"{name}: a LinearGeneral with batch_axis={dict(layer.batch_axis)} and "
            f"axis={axes} cannot carry LoRA; only one that contracts its last axes."
        )
    made = len(layer.out_features)
    return Shape(
        d_in=math.prod(layer.in_features),
        parts=((name, math.prod(layer.out_features)),),
        in_axes=axes,
        out_axes=tuple(range(-made, 0)),
    )


def _moved(kernel: str, order: list[str]) -> tuple[int, ...] | None:
    axes = tuple(kernel.index(label) for label in order)
    return None if axes == tuple(range(len(kernel))) else axes


def _labels(equation: str) -> tuple[str, str, str]:
    """Splits `"...D,DF->...F"`; an ellipsis counts as no label, rows may be any."""
    operands, _, outputs = equation.replace(" ", "").replace("...", "").partition("->")
    inputs, _, kernel = operands.partition(",")
    return inputs, kernel, outputs
