"""Kernels for many LoRA adapters in one batch. Knows JAX and arrays, no model."""

from lora_kernels.grouped_dot import grouped_dot as grouped_dot
from lora_kernels.lora_delta import lora_delta as lora_delta
from lora_kernels.lora_experts import lora_experts as lora_experts
from lora_kernels.lora_experts import pair_routing as pair_routing
from lora_kernels.routing import BASE_SLOT as BASE_SLOT
from lora_kernels.routing import Routing as Routing
from lora_kernels.routing import make_routing as make_routing
