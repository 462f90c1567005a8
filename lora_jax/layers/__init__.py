"""LoRA layers: each kind owns its slot layout, its packing and its forward."""

from lora_jax.layers.base import LoRALayer as LoRALayer
from lora_jax.layers.base import LoRARouting as LoRARouting
from lora_jax.layers.base import LoRASlots as LoRASlots
from lora_jax.layers.base import Site as Site
from lora_jax.layers.sites import Sites as Sites
from lora_jax.layers.wrap import unwrap as unwrap
from lora_jax.layers.wrap import wrap as wrap
