"""Composes host, device and batch into vLLM's two LoRA managers."""

from lora_jax.manager.managers import (
    LoRAModelManager as LoRAModelManager,
)
from lora_jax.manager.managers import (
    LRUCacheLoRAModelManager as LRUCacheLoRAModelManager,
)
from lora_jax.manager.memory import Memory as Memory
from lora_jax.manager.memory import memory_needed as memory_needed
from lora_jax.manager.snapshot import Snapshot as Snapshot
