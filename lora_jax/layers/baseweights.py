"""What a base layer multiplies by and adds, read where an adapter changes it.

Of a stack of layers the values of one are read. Knows nothing of adapters.
"""

import jax
import numpy as np
from flax import nnx

from lora_jax.layers.base import LoRALayer
from lora_jax.models.quantize import dequantized_kernel, is_quantized


def base_bias(layer: nnx.Module) -> jax.Array | None:
    """Returns the base layer's flattened bias, if it has one."""
    bias = vars(layer).get("bias")
    return bias[...].reshape(-1) if isinstance(bias, nnx.Param) else None


def host_bias(layer: LoRALayer, number: int | None) -> np.ndarray | None:
    """Returns the `(d_out,)` bias on the host, None if there is none.

    Args:
      number: which layer of a stack; None: the layer is no stack.
    """
    bias = base_bias(layer)
    if bias is None:
        return None
    return np.asarray(bias).reshape(-1, layer.lora_site.d_out)[number or 0]


def shows_kernel(layer: LoRALayer) -> bool:
    """Says whether `host_kernel` can read the layer.

    Not where its axes are other than the contracted ones followed by the others.
    """
    kernel = vars(layer).get("kernel")
    known = isinstance(kernel, nnx.Param) or is_quantized(layer)
    return known and layer.lora_site.shape.kernel_in_order


def host_kernel(layer: LoRALayer, number: int | None) -> np.ndarray:
    """Returns the `(d_in, d_out)` kernel on the host, dequantised if need be.

    Args:
      layer: one that shows its kernel.
      number: which layer of a stack; None: the layer is no stack.
    """
    site = layer.lora_site
    if is_quantized(layer):
        return np.asarray(dequantized_kernel(layer)).reshape(site.d_in, site.d_out)
    kernel = vars(layer)["kernel"][...]
    own = kernel if number is None else kernel[number]
    return np.asarray(own).reshape(site.d_in, site.d_out)
