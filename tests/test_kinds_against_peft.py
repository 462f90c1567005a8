"""Every kind of adapter that PEFT writes, in one batch, each row as PEFT answers it.

Twice: on a model with a head of its own and on one whose head is its embedding table;
with biases everywhere, so that replaced biases have something to replace.
"""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax import (
    LoRAConfig,
    LoRAMapping,
    LRUCacheLoRAModelManager,
    load_adapter,
    load_model,
)
from lora_jax.routing import activation_start

pytestmark = pytest.mark.torch

VOCAB, WIDTH, TIME = 60, 32, 9
TOLERANCE = 2e-4
ALL_LINEAR = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
]
INVOCATION = [11, 12]
ADDED = 4
"""Tokens that the resized adapter adds to the vocabulary."""

KINDS = {
    "plain": {},
    "all linear, rank 8": {"target_modules": ALL_LINEAR, "r": 8},
    "rslora": {"use_rslora": True, "lora_alpha": 9},
    "patterns": {
        "target_modules": ALL_LINEAR,
        "rank_pattern": {"k_proj": 2, r"layers\.1\.self_attn\.q_proj": 7},
        "alpha_pattern": {"q_proj": 11},
    },
    "lora_bias": {"lora_bias": True},
    "bias all": {"bias": "all"},
    "bias lora_only": {"bias": "lora_only"},
    "dora": {"use_dora": True, "target_modules": ALL_LINEAR},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "dora embedding": {"use_dora": True, "target_modules": ["v_proj", "embed_tokens"]},
    "head": {"target_modules": ["v_proj", "lm_head"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [7, 3, 58]}},
    "saved head": {"modules_to_save": ["lm_head"]},
    "saved embedding": {"modules_to_save": ["embed_tokens"]},
    "resized": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "activated": {"alora_invocation_tokens": INVOCATION},
    "some layers": {"layers_to_transform": [1]},
}
"""Name -> options of `peft.LoraConfig`."""


def _base(tied):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    _shake(model.parameters(), 0)
    return model.eval()


def _shake(parameters, seed):
    """Moves every parameter, so that nothing is zero, one, or where it began."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))


def _write(base, kind, seed, folder):
    """Trains nothing, but moves all that training would move; saves; PEFT's logits."""
    import copy

    def own_base():
        own = copy.deepcopy(base)
        if kind == "resized":
            own.resize_token_embeddings(VOCAB + ADDED)
        return own

    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    options = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
    config = LoraConfig(task_type="CAUSAL_LM", **(options | KINDS[kind]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(own_base(), config)
        _shake((p for p in model.parameters() if p.requires_grad), seed)
        model.save_pretrained(folder)
        again = PeftModel.from_pretrained(own_base(), folder).eval()
        with torch.no_grad():
            tokens = torch.tensor(_tokens()[None])
            return again(tokens).logits[0].numpy()


def _tokens():
    tokens = np.random.default_rng(0).integers(1, VOCAB, TIME)
    tokens[2:4] = INVOCATION
    tokens[5:8] = [7, 3, 58]
    return tokens


@pytest.fixture(scope="module", params=["untied", "tied"])
def answers(request, tmp_path_factory):
    """The served model with all adapters, and PEFT's logits for each row."""
    import torch

    folder = tmp_path_factory.mktemp(request.param)
    base = _base(request.param == "tied")
    base.save_pretrained(folder / "base")
    expected = {
        kind: _write(base, kind, seed, folder / f"a{seed}")
        for seed, kind in enumerate(KINDS, start=1)
    }
    with torch.no_grad():
        expected["base"] = base(torch.tensor(_tokens()[None])).logits[0].numpy()
    model = load_model(str(folder / "base"))
    manager = LRUCacheLoRAModelManager(
        model, LoRAConfig(max_loras=len(KINDS), max_lora_rank=8)
    )
    for seed in range(1, len(KINDS) + 1):
        manager.add_adapter(load_adapter(folder / f"a{seed}", adapter_id=seed))
        manager.activate_adapter(seed)
    return manager, expected


def _logits(manager, names):
    """One batch, a row for each name."""
    numbers = {kind: number for number, kind in enumerate(KINDS, start=1)}
    tokens, ids = _tokens(), []
    for name in names:
        number = numbers.get(name, 0)
        invocation = INVOCATION if name == "activated" else ()
        start = activation_start(tokens.tolist(), invocation)
        ids += [number if place >= start else 0 for place in range(TIME)]
    manager.set_adapter_mapping(LoRAMapping(ids, ids[TIME - 1 :: TIME]))
    batch = jnp.asarray(np.tile(tokens, (len(names), 1)), jnp.int32)
    return np.asarray(manager.model(batch))


def test_every_kind_differs_from_the_base_and_from_the_others(answers):
    _, expected = answers
    names = list(expected)
    for index, left in enumerate(names):
        for right in names[index + 1 :]:
            gap = np.abs(expected[left][:, :VOCAB] - expected[right][:, :VOCAB]).max()
            assert gap > 10 * TOLERANCE, (left, right)


def test_all_kinds_in_one_batch_equal_peft(answers):
    manager, expected = answers
    names = ["base", *KINDS, "base", *reversed(KINDS)]
    got = _logits(manager, names)
    errors = {
        name: float(np.abs(row[:, : expected[name].shape[1]] - expected[name]).max())
        for name, row in zip(names, got, strict=True)
    }
    assert max(errors.values()) < TOLERANCE, errors
    for name, row in zip(names, got, strict=True):
        assert np.all(np.isneginf(row[:, expected[name].shape[1] :])), name


def test_base_rows_are_bit_for_bit_those_of_a_batch_of_base_rows(answers):
    manager, _ = answers
    mixed = _logits(manager, ["base", *KINDS, "base"])
    base = _logits(manager, ["base"] * (len(KINDS) + 2))
    np.testing.assert_array_equal(mixed[[0, -1], :, :VOCAB], base[[0, -1]])
