"""Adds each token's own low-rank update to a base layer's output."""

from lora_kernels.lora_delta.api import lora_delta as lora_delta
from lora_kernels.lora_delta.api import which_implementation as which_implementation
