"""Which class computes which checkpoint: from a folder's config.json to a model.

A new kind of model is a reader in CONFIGS or a row in MODELS.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from flax import nnx
from jax.typing import DTypeLike

from lora_jax.errors import ModelError
from lora_jax.models.causal_lm import CausalLM
from lora_jax.models.classifiers import (
    BertClassifier,
    DecoderClassifier,
    RobertaClassifier,
)
from lora_jax.models.config import ModelConfig, config_from_dict
from lora_jax.models.decoder import Decoder
from lora_jax.models.encoder import Encoder
from lora_jax.models.encoder_config import (
    ENCODER_FAMILIES,
    EncoderConfig,
    encoder_config,
)
from lora_jax.models.families import FAMILIES
from lora_jax.models.gpt2 import GPT2Decoder
from lora_jax.models.names import Naming

Config = ModelConfig | EncoderConfig
"""What a config.json means."""

Body = Decoder | GPT2Decoder | Encoder
"""What turns token ids, a mask and segments into hidden states."""

Model = CausalLM | DecoderClassifier | BertClassifier | RobertaClassifier | Body
"""What `load_model` returns, with its `.config`."""

CONFIGS: Mapping[str, Callable[..., Config]] = {
    **dict.fromkeys(FAMILIES, config_from_dict),
    **dict.fromkeys(ENCODER_FAMILIES, encoder_config),
}
"""`model_type` -> reader of the rest of config.json."""

MODELS: Mapping[tuple[str, str], type] = {
    ("decoder", "causal_lm"): CausalLM,
    ("decoder", "classifier"): DecoderClassifier,
    ("decoder", "none"): Decoder,
    ("gpt2", "causal_lm"): CausalLM,
    ("gpt2", "classifier"): DecoderClassifier,
    ("gpt2", "none"): GPT2Decoder,
    ("bert", "classifier"): BertClassifier,
    ("roberta", "classifier"): RobertaClassifier,
    ("bert", "none"): Encoder,
    ("roberta", "none"): Encoder,
}
"""Body and head -> the class that computes them."""


def read_config(folder: Path) -> Config:
    """Returns the config of a Hugging Face folder.

    Raises:
      ModelError: if config.json is missing or malformed, or asks for what cannot be
        computed; the text names every fault.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no config.json; a model is a Hugging Face folder with "
            "config.json and model.safetensors"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds {type(values).__name__}, expected an object")
    read = CONFIGS.get(str(values.get("model_type")))
    if read is None:
        raise ModelError(
            f"{path}: model_type {values.get('model_type')!r} is not supported; "
            f"known: {', '.join(sorted(CONFIGS))}"
        )
    return read(values, origin=str(path))


def build_model(config: Config, *, dtype: DTypeLike, rngs: nnx.Rngs) -> Model:
    """Returns a model of random weights; under `nnx.eval_shape` one without any.

    Args:
      config: what `read_config` returned.
      dtype: of parameters and activations.
      rngs: for the weights.
    """
    return _kind(config)(config, dtype=dtype, rngs=rngs)


def body_of(model: Model) -> Body:
    """Returns the part of any model that gives hidden states, to embed texts with."""
    return model if isinstance(model, Body) else model.body


def naming(config: Config) -> Naming:
    """Returns how a checkpoint of `config` may spell its tensors."""
    return _kind(config).naming(config)


def _kind(config: Config) -> type:
    return MODELS[config.body, config.head]
