"""Weight-only quantisation of a model's linear layers, by qwix.

Each linear layer is replaced, in place, by qwix' quantised version of itself: int8,
int4 or nf4 kernels with float scales, dequantised in the product. Activations stay as
they are, so a LoRA layer around one sees unquantised inputs. Needs the extra `quant`.

Experts keep their layers, whose kernels become int8 with one scale for each output of
each expert. The products are scaled, not the kernels: no expert is ever dequantised.
Routers stay as they are, for a small change of their scores sends tokens elsewhere.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from lora_jax.errors import ModelError
from lora_jax.models.experts import ExpertLinear, Experts

Quantization = Literal["int8", "int4", "nf4"]
"""Kinds of kernel: one scale for each output column (int8) or for each tile of it."""

TILE = 32
"""Inputs that share one scale in int4 and nf4 kernels, at most."""


def quantize(model: nnx.Module, kind: Quantization) -> None:
    """Quantises the kernel of every linear layer and expert of a model, in place.

    Embeddings and heads that are tied to them stay as they are, and so do linear layers
    beside experts: they choose among these or weigh them. Do this before the model is
    given to a manager.

    Args:
      model: any Flax NNX model; layers reached by two paths stay one layer.
      kind: "int8": one scale for each output; "int4", "nf4": one for each tile of at
        most 32 inputs of an output; not for a model with experts.
    Raises:
      ModelError: if qwix is not installed, there is no linear layer, or the model has
        experts and the kind is not "int8".

    Source: https://github.com/google/qwix.
    """
    try:
        import qwix
    except ImportError as error:
        raise ModelError(
            'quantising needs qwix; install it with pip install "lora-jax[quant]".'
        ) from error
    modules = [module for _, module in nnx.iter_modules(model)]
    experts = [module for module in modules if isinstance(module, ExpertLinear)]
    if experts and kind != "int8":
        raise ModelError(
            f"{type(model).__name__} has experts, whose kernels cannot be {kind}: it "
            'has scales for tiles of inputs, theirs are for outputs; take "int8".'
        )
    for layer in experts:
        _quantize_experts(qwix, layer)
    done: dict[int, nnx.Module] = {}
    for parent in modules:
        for name, child in _layers_of(parent):
            if id(child) not in done:
                done[id(child)] = _quantized(qwix, child, kind)
            _set_child(parent, name, done[id(child)])
    if not done and not experts:
        raise ModelError(f"{type(model).__name__} has no linear layer to quantise.")


def _layers_of(parent: nnx.Module) -> list[tuple[object, nnx.Linear]]:
    """Returns a module's own linear layers; none if they stand beside experts."""
    children = list(nnx.iter_children(parent))
    if any(isinstance(child, Experts) for _, child in children):
        return []
    return [(name, child) for name, child in children if isinstance(child, nnx.Linear)]


def _quantize_experts(qwix: object, layer: ExpertLinear) -> None:
    array = qwix.quantize(  # type: ignore[attr-defined]
        layer.kernel[...], "int8", channelwise_axes=[0, 2]
    )
    layer.scale = nnx.Param(array.scale[:, 0], expert_axis=0)
    layer.kernel.set_value(array.qvalue)


def _quantized(qwix: object, layer: nnx.Linear, kind: Quantization) -> nnx.Module:
    tile = None if kind == "int8" else _tile(layer.in_features)
    rule = qwix.QuantizationRule(  # type: ignore[attr-defined]
        module_path=".*", weight_qtype=kind, tile_size=tile
    )
    inputs = jnp.zeros((1, layer.in_features), layer.kernel[...].dtype)
    provider = qwix.PtqProvider([rule])  # type: ignore[attr-defined]
    return qwix.quantize_model(layer, provider, inputs)  # type: ignore[attr-defined]


def _tile(d_in: int) -> int:
    """Returns the largest tile that cuts the inputs evenly."""
    return next(size for size in range(min(TILE, d_in), 0, -1) if d_in % size == 0)


def _set_child(parent: nnx.Module, name: object, child: nnx.Module) -> None:
    if isinstance(name, int):
        parent[name] = child  # type: ignore[index]
    else:
        setattr(parent, str(name), child)


def is_quantized(layer: nnx.Module) -> bool:
    """Says whether qwix has quantised the layer's kernel."""
    kernel = vars(layer).get("kernel")
    return type(kernel).__module__.partition(".")[0] == "qwix"


def dequantized_kernel(layer: nnx.Module) -> jax.Array:
    """Returns a quantised layer's kernel as floats, read from its stored values."""
    import qwix

    return qwix.dequantize(vars(layer)["kernel"].array)


def dequantized(layer: nnx.Linear) -> jax.Array:
    """Returns the float `(d_in, d_out)` kernel that a quantised layer multiplies by."""
    identity = jnp.eye(layer.in_features, dtype=jnp.float32)
    bias = vars(layer).get("bias")
    product = layer(identity)
    return product if bias is None else product - bias[...][None]
