"""(1) Folder on disk -> Adapter. NumPy and safetensors only; never imports JAX."""

from lora_jax.adapters.adapter import Adapter as Adapter
from lora_jax.adapters.combine import combine_adapters as combine_adapters
from lora_jax.adapters.copies import BaseCopy as BaseCopy
from lora_jax.adapters.extract import extract_adapter as extract_adapter
from lora_jax.adapters.load import adapter_from_tensors as adapter_from_tensors
from lora_jax.adapters.load import load_adapter as load_adapter
from lora_jax.adapters.mapper import NameMapper as NameMapper
from lora_jax.adapters.merge import MergeReport as MergeReport
from lora_jax.adapters.merge import merge_adapters as merge_adapters
from lora_jax.adapters.names import match_modules as match_modules
from lora_jax.adapters.parts import AdapterPart as AdapterPart
from lora_jax.adapters.parts import DoRA as DoRA
from lora_jax.adapters.parts import EmbeddingLowRank as EmbeddingLowRank
from lora_jax.adapters.parts import ExpertPairs as ExpertPairs
from lora_jax.adapters.parts import ExpertsLowRank as ExpertsLowRank
from lora_jax.adapters.parts import FullModule as FullModule
from lora_jax.adapters.parts import LoRABias as LoRABias
from lora_jax.adapters.parts import LowRank as LowRank
from lora_jax.adapters.parts import ReplacedBias as ReplacedBias
from lora_jax.adapters.parts import TokenRows as TokenRows
from lora_jax.adapters.report import Report as Report
from lora_jax.adapters.save import save_adapter as save_adapter
