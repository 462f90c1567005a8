"""From a path or id to a model or tokenizer: finds the folder, then reads it."""

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from lora_jax.models.causal_lm import CausalLM
from lora_jax.models.config import read_config
from lora_jax.models.fill import model_from_folder
from lora_jax.models.source import no_progress, resolve_model
from lora_jax.models.tokenizer import Tokenizer, read_tokenizer

DTYPES = ("float32", "bfloat16")
"""Dtypes that a model computes in."""


def load_model(
    path_or_id: str | Path,
    dtype: DTypeLike = "float32",
    *,
    progress: Callable[[str], None] = no_progress,
) -> CausalLM:
    """Returns the model of a Hugging Face folder, with its `.config`.

    Args:
      path_or_id: a folder, a hub id (`owner/name` or `owner/name@revision`), or
        `"smollm2-135m"`, the default model of the demo.
      dtype: of parameters and activations, `float32` or `bfloat16`.
      progress: is called with a line of text at each step.

    Raises:
      ModelError: if the model cannot be found, is not supported, or its weights do not
        fit its config; the text names every fault.
      ValueError: if `dtype` is not supported.
    """
    if jnp.dtype(dtype).name not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; use one of {DTYPES}")
    folder = resolve_model(path_or_id, progress=progress)
    config = read_config(folder)
    return model_from_folder(folder, config, dtype=dtype, progress=progress)


def load_tokenizer(
    path_or_id: str | Path, *, progress: Callable[[str], None] = no_progress
) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face folder; `path_or_id` as in `load_model`.

    Raises:
      ModelError: if the folder has no tokenizer.json.
    """
    return read_tokenizer(resolve_model(path_or_id, progress=progress))
