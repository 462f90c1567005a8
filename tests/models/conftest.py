"""Tiny random checkpoints of each family, written by transformers, as the oracle."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder that transformers saved, and what its model answers for `tokens`."""

    folder: Path
    tokens: np.ndarray
    logits: np.ndarray


@pytest.fixture(scope="session")
def save_tiny(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Checkpoint]:
    """Returns a function that makes a random model of a family and saves it."""

    def save(
        model_type: str, changes: Mapping[str, object], **save_options: object
    ) -> Checkpoint:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        _make_visible(model)
        folder = tmp_path_factory.mktemp(model_type)
        model.save_pretrained(folder, **save_options)
        tokens = np.random.default_rng(1).integers(1, config.vocab_size, (2, 20))
        with torch.no_grad():
            logits = model.eval()(torch.tensor(tokens)).logits
        return Checkpoint(folder, tokens.astype(np.int32), logits.numpy())

    return save


def _make_visible(model) -> None:
    """Gives norms and biases, ones and zeros at first, values that show."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.2 if parameter.ndim == 1 else 0.1))
