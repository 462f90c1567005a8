"""Multiplies each row by the kernels of its own groups: the experts of a mixture."""

from lora_kernels.grouped_dot.api import grouped_dot as grouped_dot
from lora_kernels.grouped_dot.api import which_implementation as which_implementation
