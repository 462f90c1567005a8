"""Adds to each chosen expert's output the low-rank update of its token's adapter."""

from lora_kernels.lora_experts.api import lora_experts as lora_experts
from lora_kernels.lora_experts.api import which_implementation as which_implementation
from lora_kernels.lora_experts.pairs import pair_routing as pair_routing
