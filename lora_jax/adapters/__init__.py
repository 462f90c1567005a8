"""(1) Folder on disk -> Adapter. NumPy and safetensors only; never imports JAX."""

from lora_jax.adapters.adapter import Adapter as Adapter
from lora_jax.adapters.adapter import AdapterPart as AdapterPart
from lora_jax.adapters.adapter import FullModule as FullModule
from lora_jax.adapters.adapter import LowRank as LowRank
from lora_jax.adapters.load import adapter_from_tensors as adapter_from_tensors
from lora_jax.adapters.load import load_adapter as load_adapter
from lora_jax.adapters.names import match_modules as match_modules
from lora_jax.adapters.report import Report as Report
