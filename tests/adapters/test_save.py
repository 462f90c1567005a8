"""What is written is read back equal, and loads in PEFT to the same logits."""

import json

import ml_dtypes
import numpy as np
import pytest

from adapter_files import PREFIX, UP, WIDTH, Q, V, config, normal, pair, pairs, write
from lora_jax.adapters import (
    Adapter,
    LowRank,
    Report,
    adapter_from_tensors,
    load_adapter,
    save_adapter,
)
from lora_jax.adapters.content import hash_content
from lora_jax.errors import AdapterError

RNG = np.random.default_rng(2)
EMBED = "model.embed_tokens"
EXPERTS = "model.layers.0.mlp.experts"
TABLE = normal(RNG, 100, WIDTH)
ROW = TABLE[0]
EXPERT_PAIR = {
    f"{EXPERTS}.lora_A.weight": normal(RNG, 12, WIDTH),
    f"{EXPERTS}.lora_B.weight": normal(RNG, 48, 12),
}
EMBED_PAIR = {
    f"{EMBED}.lora_embedding_A": TABLE[:4, :].T[:4],
    f"{EMBED}.lora_embedding_B": normal(RNG, WIDTH, 4),
    f"{EMBED}.base_layer.weight": TABLE,
}

CASES = {
    "plain": ({}, {}),
    "rslora": ({}, {"use_rslora": True, "lora_alpha": 7}),
    "patterns": (
        {},
        {"r": 8, "rank_pattern": {".*": 4}, "alpha_pattern": {"q_proj": 3}},
    ),
    "lora_bias": ({f"{Q}.lora_B.bias": ROW}, {"lora_bias": True}),
    "dora": ({f"{Q}.lora_magnitude_vector": ROW}, {"use_dora": True}),
    "bias_all": ({f"{Q}.base_layer.bias": ROW, f"{V}.bias": ROW}, {"bias": "all"}),
    "lora_only": ({f"{Q}.base_layer.bias": ROW}, {"bias": "lora_only"}),
    "embedding": (EMBED_PAIR, {}),
    "full": ({"score.weight": TABLE}, {"modules_to_save": ["classifier", "score"]}),
    "resized": ({f"{EMBED}.weight": TABLE}, {}),
    "tokens": (
        {f"{EMBED}.token_adapter.trainable_tokens_delta": TABLE[:2]},
        {"trainable_token_indices": [7, 3]},
    ),
    "alora": ({}, {"alora_invocation_tokens": [5, 6]}),
    "experts": (
        EXPERT_PAIR,
        {"target_parameters": ["mlp.experts.gate_up_proj"], "peft_version": "0.18.1"},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16])
def test_what_is_written_is_read_back_equal(tmp_path, case, dtype):
    extra, fields = CASES[case]
    tensors = pair(Q, 4) | {f"{PREFIX}{name}": array for name, array in extra.items()}
    tensors = {name: array.astype(dtype) for name, array in tensors.items()}
    adapter = adapter_from_tensors(tensors, config(**fields), name="a")
    again = load_adapter(save_adapter(adapter, tmp_path / "out"))
    assert again.content_hash == adapter.content_hash
    assert list(again.parts) == list(adapter.parts)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_second_writing_is_byte_equal(tmp_path):
    first = save_adapter(load_adapter(write(tmp_path / "in", pairs())), tmp_path / "1")
    second = save_adapter(load_adapter(first), tmp_path / "2")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def by_hand(parts):
    content = hash_content(parts, ())
    return Adapter("hand", 1, parts, content, Report((), (), 0))


def test_an_adapter_without_config_gets_patterns_of_its_own(tmp_path):
    parts = {
        f"model.layers.{layer}.mlp.up_proj": LowRank(
            normal(RNG, rank, 32), normal(RNG, 64, rank), scale
        )
        for layer, (rank, scale) in enumerate(
            [(4, 0.7), (4, 0.7), (3, 1 / 3), (4, 9.1)]
        )
    }
    adapter = by_hand(parts)
    again = load_adapter(save_adapter(adapter, tmp_path))
    assert again.content_hash == adapter.content_hash
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["r"] == 4
    assert len(written["rank_pattern"]) == len(written["alpha_pattern"]) == 2


def test_what_peft_cannot_say_is_refused_before_anything_is_written(tmp_path):
    plain = adapter_from_tensors(pairs([Q, UP]), config(), name="a")
    parts = dict(plain.parts)
    parts[Q] = LowRank(parts[Q].a, parts[Q].b, 9.0)
    changed = Adapter(
        "b", 1, parts, hash_content(parts, ()), plain.report, "", plain.config
    )
    with pytest.raises(AdapterError, match=r"q_proj: lora of rank 4, scale 9\.0"):
        save_adapter(changed, tmp_path / "out")
    assert not (tmp_path / "out").exists()
