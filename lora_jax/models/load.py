"""From a path or id to a model or tokenizer: finds the folder, then reads it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from lora_jax.errors import ModelError
from lora_jax.models.causal_lm import CausalLM
from lora_jax.models.checkpoint import list_tensors
from lora_jax.models.encoder_config import EncoderConfig
from lora_jax.models.fill import fill
from lora_jax.models.source import no_progress, resolve_model
from lora_jax.models.tokenizer import Tokenizer, read_tokenizer
from lora_jax.models.zoo import Model, build_model, naming, read_config

DTYPES = ("float32", "bfloat16")
"""Dtypes that a model computes in."""

POOLER = "pooler.dense.weight"
"""An encoder's checkpoint may come without this; then the encoder has no pooler."""


def load_model(
    path_or_id: str | Path,
    dtype: DTypeLike = "float32",
    *,
    progress: Callable[[str], None] = no_progress,
) -> Model:
    """Returns the model of a Hugging Face folder, with its `.config`.

    Args:
      path_or_id: a folder, a hub id (`owner/name` or `owner/name@revision`), or
        `"smollm2-135m"`, the default model of the demo.
      dtype: of parameters and activations, `float32` or `bfloat16`.
      progress: is called with a line of text at each step.

    Returns:
      A `CausalLM`, a `Classifier` or an `Encoder`, as `architectures` in config.json
      says.

    Raises:
      ModelError: if the model cannot be found, is not supported, or its weights do not
        fit its config; the text names every fault.
      ValueError: if `dtype` is not supported.
    """
    if jnp.dtype(dtype).name not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; use one of {DTYPES}")
    folder = resolve_model(path_or_id, progress=progress)
    config, tensors = read_config(folder), list_tensors(folder)
    if isinstance(config, EncoderConfig) and config.head == "none":
        has_pooler = any(name.endswith(POOLER) for name in tensors)
        config = dataclasses.replace(config, has_pooler=has_pooler)
    return fill(
        lambda rngs: build_model(config, dtype=dtype, rngs=rngs),
        naming(config),
        tensors,
        origin=str(folder),
        progress=progress,
    )


def load_causal_lm(
    path_or_id: str | Path,
    dtype: DTypeLike = "float32",
    *,
    progress: Callable[[str], None] = no_progress,
) -> CausalLM:
    """Returns the language model of a Hugging Face folder; arguments as `load_model`.

    Raises:
      ModelError: as `load_model`, and if the folder holds another kind of model.
      ValueError: if `dtype` is not supported.
    """
    model = load_model(path_or_id, dtype, progress=progress)
    if not isinstance(model, CausalLM):
        raise ModelError(
            f"{path_or_id} is a {type(model).__name__}, which generates no text; a "
            "language model's config.json names ...ForCausalLM in architectures"
        )
    return model


def load_tokenizer(
    path_or_id: str | Path, *, progress: Callable[[str], None] = no_progress
) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face folder; `path_or_id` as in `load_model`.

    Raises:
      ModelError: if the folder has no tokenizer.json.
    """
    return read_tokenizer(resolve_model(path_or_id, progress=progress))
