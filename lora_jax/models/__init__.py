"""Flax NNX models that load Hugging Face checkpoints; they know nothing of LoRA."""

from lora_jax.models.cache import KVCache as KVCache
from lora_jax.models.cache import empty_cache as empty_cache
from lora_jax.models.cache import insert as insert
from lora_jax.models.causal_lm import CausalLM as CausalLM
from lora_jax.models.classifiers import Classifier as Classifier
from lora_jax.models.config import ModelConfig as ModelConfig
from lora_jax.models.config import config_from_dict as config_from_dict
from lora_jax.models.encoder import Encoder as Encoder
from lora_jax.models.encoder_config import EncoderConfig as EncoderConfig
from lora_jax.models.labels import default_labels as default_labels
from lora_jax.models.linear import FusedLinear as FusedLinear
from lora_jax.models.load import load_causal_lm as load_causal_lm
from lora_jax.models.load import load_model as load_model
from lora_jax.models.load import load_tokenizer as load_tokenizer
from lora_jax.models.pooling import POOLINGS as POOLINGS
from lora_jax.models.pooling import folder_pooling as folder_pooling
from lora_jax.models.pooling import normalize as normalize
from lora_jax.models.source import DEFAULT_MODEL as DEFAULT_MODEL
from lora_jax.models.source import cache_dir as cache_dir
from lora_jax.models.source import resolve_model as resolve_model
from lora_jax.models.tokenizer import Tokenizer as Tokenizer
from lora_jax.models.zoo import Model as Model
from lora_jax.models.zoo import body_of as body_of
from lora_jax.models.zoo import build_model as build_model
from lora_jax.models.zoo import read_config as read_config
