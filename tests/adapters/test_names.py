"""Tensor names and module paths, by whole path."""

import pytest

from lora_jax.adapters import match_modules
from lora_jax.adapters.names import Role, TensorName, read_name

MODULE = "model.layers.0.self_attn.q_proj"

NAMES = [
    (f"base_model.model.{MODULE}.lora_A.weight", TensorName(MODULE, Role.A, "")),
    (f"{MODULE}.lora_B.weight", TensorName(MODULE, Role.B, "")),
    (f"{MODULE}.lora_B.default.weight", TensorName(MODULE, Role.B, "default")),
    (f"{MODULE}.lora_A.v1.5.weight", TensorName(MODULE, Role.A, "v1.5")),
    (
        f"thinker.base_model.model.{MODULE}.lora_A.weight",
        TensorName(f"thinker.{MODULE}", Role.A, ""),
    ),
    # The prefix goes once, at the front.
    (
        "base_model.model.a.base_model.model.b.lora_A.weight",
        TensorName("a.base_model.model.b", Role.A, ""),
    ),
]


@pytest.mark.parametrize(("name", "expected"), NAMES)
def test_a_known_name_is_taken_apart(name, expected):
    assert read_name(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "",
        "lora_A.weight",
        ".lora_A.weight",
        f"{MODULE}.lora_A.what",
        f"{MODULE}.lora_A.default.default",
        f"{MODULE}.lora_down.weight",
        f"{MODULE}.lora_B.default.other",
        f"{MODULE}.lora_A",
    ],
)
def test_an_unknown_name_is_none(name):
    assert read_name(name) is None


TEXT = [
    "model.layers.0.self_attn.q_proj",
    "layers.0.self_attn.q_proj",
    "model.language_model.layers.0.self_attn.q_proj",
    "language_model.model.layers.0.self_attn.q_proj",
    "language_model.layers.0.self_attn.q_proj",
    "model.language_model.model.layers.0.self_attn.q_proj",
    "thinker.model.layers.0.self_attn.q_proj",
]
TOWER = [
    "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
    "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
    "model.vision_tower.encoder.layers.0.self_attn.q_proj",
]
VISUAL = ["visual.blocks.0.attn.qkv", "model.visual.blocks.0.attn.qkv"]
HEAD = ["lm_head", "language_model.lm_head"]
EMBED = ["model.embed_tokens", "embed_tokens", "model.language_model.embed_tokens"]
BERT = [
    "bert.encoder.layer.0.attention.self.query",
    "encoder.layer.0.attention.self.query",
]
GPT2 = ["transformer.h.0.attn.c_attn", "h.0.attn.c_attn"]


@pytest.mark.parametrize("known", [TEXT, TOWER, VISUAL, HEAD, EMBED, BERT, GPT2])
def test_every_spelling_of_a_module_means_every_other(known):
    others = {
        TEXT[0].replace("q_proj", "k_proj"),
        "model.layers.10.self_attn.q_proj",
        "talker.model.layers.0.self_attn.q_proj",
        "visual.merger.mlp.0",
    }
    for name in known:
        expected = {spelling: name for spelling in known}
        assert match_modules(known, {name} | others) == (expected, [])


UNKNOWN = [
    "self_attn.q_proj",
    "q_proj",
    "backbone.layers.0.self_attn.q_proj",
    "model.model.layers.0.self_attn.q_proj",
    "model.layers.00.self_attn.q_proj",
    "model.layers.0.self_attn.xq_proj",
    "vision_tower.layers.0.self_attn.q_proj",
    "talker.model.layers.0.self_attn.q_proj",
]


@pytest.mark.parametrize("module", UNKNOWN)
def test_nothing_is_guessed_from_the_end_of_a_path(module):
    assert match_modules([module], [TEXT[0], *VISUAL[:1], TOWER[0]]) == ({}, [module])


def test_a_path_that_could_be_two_modules_is_not_matched():
    known = ["visual.merger", "model.visual.merger"]
    assert match_modules(["thinker.visual.merger"], known)[1] == [
        "thinker.visual.merger"
    ]
    assert match_modules(known, known)[0] == {name: name for name in known}
