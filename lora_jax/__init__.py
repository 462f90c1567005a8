"""Many LoRA adapters on one frozen model, in one jitted batch.

The usual walk: `load_model`, a manager over it, `load_adapter` + `add_adapter` +
`activate_adapter`, then `set_adapter_mapping` and `model(tokens)`; or `split` and
`forward` in a `jax.jit` of your own.
"""

from lora_jax.adapters import Adapter as Adapter
from lora_jax.adapters import FullModule as FullModule
from lora_jax.adapters import LowRank as LowRank
from lora_jax.adapters import adapter_from_tensors as adapter_from_tensors
from lora_jax.adapters import combine_adapters as combine_adapters
from lora_jax.adapters import extract_adapter as extract_adapter
from lora_jax.adapters import load_adapter as load_adapter
from lora_jax.adapters import merge_adapters as merge_adapters
from lora_jax.adapters import save_adapter as save_adapter
from lora_jax.bank import Bank as Bank
from lora_jax.config import LoRAConfig as LoRAConfig
from lora_jax.errors import AdapterError as AdapterError
from lora_jax.errors import AdapterNotFoundError as AdapterNotFoundError
from lora_jax.errors import ConfigError as ConfigError
from lora_jax.errors import LoRAError as LoRAError
from lora_jax.errors import ModelError as ModelError
from lora_jax.errors import RequestError as RequestError
from lora_jax.forward import forward as forward
from lora_jax.forward import merge as merge
from lora_jax.forward import split as split
from lora_jax.layers import LoRARouting as LoRARouting
from lora_jax.layers import LoRASlots as LoRASlots
from lora_jax.manager import LoRAModelManager as LoRAModelManager
from lora_jax.manager import LRUCacheLoRAModelManager as LRUCacheLoRAModelManager
from lora_jax.manager import Memory as Memory
from lora_jax.manager import Snapshot as Snapshot
from lora_jax.manager import memory_needed as memory_needed
from lora_jax.models import load_model as load_model
from lora_jax.models import load_tokenizer as load_tokenizer
from lora_jax.models import shard_experts as shard_experts
from lora_jax.models import shard_tensors as shard_tensors
from lora_jax.request import LoRARequest as LoRARequest
from lora_jax.routing import LoRAMapping as LoRAMapping
from lora_jax.routing import LoRAMappingType as LoRAMappingType
from lora_jax.routing import RoutingSet as RoutingSet
from lora_jax.routing import routing_from_slots as routing_from_slots
from lora_jax.shapes import BASE_SLOT as BASE_SLOT
from lora_jax.worker import LRUCacheWorkerLoRAManager as LRUCacheWorkerLoRAManager
from lora_jax.worker import WorkerLoRAManager as WorkerLoRAManager
