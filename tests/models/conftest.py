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
    """A folder that transformers saved, and what its model answers for `tokens`.

    Attributes:
      tokens: `(2, 20)`; the second row is shorter, see `mask`.
      mask: which tokens are not padding.
      token_types: segments, for models that have them.
      output: logits, scores, or the last hidden states if there is no head.
    """

    folder: Path
    tokens: np.ndarray
    mask: np.ndarray
    token_types: np.ndarray
    output: np.ndarray


@pytest.fixture(scope="session")
def save_tiny(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Checkpoint]:
    """Returns a function that makes a random model of a family and saves it."""

    def save(
        model_type: str,
        changes: Mapping[str, object],
        *,
        auto: str = "AutoModelForCausalLM",
        **save_options: object,
    ) -> Checkpoint:
        import torch
        import transformers

        torch.manual_seed(0)
        values = {**SIZES, **changes}
        config = transformers.AutoConfig.for_model(model_type, **values)
        model = getattr(transformers, auto).from_config(
            config, attn_implementation="eager"
        )
        _make_visible(model)
        folder = tmp_path_factory.mktemp(model_type)
        model.save_pretrained(folder, **save_options)
        inputs = _inputs(config.vocab_size, config.pad_token_id)
        used = dict(inputs)
        if "bert" not in model_type:
            del used["token_type_ids"]
        with torch.no_grad():
            output = model.eval()(**{k: torch.tensor(v) for k, v in used.items()})[0]
        return Checkpoint(
            folder,
            inputs["input_ids"].astype(np.int32),
            inputs["attention_mask"].astype(bool),
            inputs["token_type_ids"].astype(np.int32),
            output.numpy(),
        )

    return save


def _inputs(vocab_size: int, pad_token_id: int) -> dict[str, np.ndarray]:
    """Returns two texts of 20 and 13 tokens, padded on the right, of two segments."""
    tokens = np.random.default_rng(1).integers(3, vocab_size, (2, 20))
    mask = np.arange(20)[None] < np.array([[20], [13]])
    types = np.broadcast_to(np.arange(20)[None] >= 9, (2, 20)).astype(np.int64)
    return {
        "input_ids": np.where(mask, tokens, pad_token_id),
        "attention_mask": mask.astype(np.int64),
        "token_type_ids": types,
    }


def _make_visible(model) -> None:
    """Gives norms and biases, ones and zeros at first, values that show."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.2 if parameter.ndim == 1 else 0.1))
