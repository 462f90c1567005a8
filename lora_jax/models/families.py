"""What each `model_type` of Hugging Face means where its config.json says nothing.

One row per family: the defaults of its configuration class, its own spellings of common
keys, and which facts are fixed by the architecture instead of by a key. Nothing here
was invented: each value is the one in transformers' `configuration_<model_type>.py`
and `modeling_<model_type>.py`.
"""

from lora_jax.models.dense_families import (
    GEMMA2,
    GEMMA3,
    GPT2,
    LLAMA,
    MISTRAL,
    PHI3,
    QWEN2,
    QWEN3,
)
from lora_jax.models.family import FULL as FULL
from lora_jax.models.family import SLIDING as SLIDING
from lora_jax.models.family import Family
from lora_jax.models.moe_families import GPT_OSS, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "phi3": PHI3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gpt2": GPT2,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "gpt_oss": GPT_OSS,
}
"""The `model_type`s of decoders that can be loaded."""
