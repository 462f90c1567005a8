"""From LoRARequest to an active adapter, with loading in the background."""

from lora_jax.worker.workers import (
    LRUCacheWorkerLoRAManager as LRUCacheWorkerLoRAManager,
)
from lora_jax.worker.workers import (
    WorkerLoRAManager as WorkerLoRAManager,
)
