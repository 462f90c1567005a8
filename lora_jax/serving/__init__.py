"""The jitted continuous-batching engine: many requests, many adapters, one step."""

from lora_jax.serving.compilations import CompilationCounter as CompilationCounter
from lora_jax.serving.engine import Engine as Engine
from lora_jax.serving.requests import FinishReason as FinishReason
from lora_jax.serving.requests import GenerationRequest as GenerationRequest
from lora_jax.serving.requests import GenerationResult as GenerationResult
from lora_jax.serving.requests import SamplingParams as SamplingParams
from lora_jax.serving.requests import TokenEvent as TokenEvent
