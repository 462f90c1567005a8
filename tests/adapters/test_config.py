"""What a config means, and what it is refused for."""

import math
import re

import pytest

from lora_jax.adapters.config import read_meaning
from lora_jax.adapters.fields import RULES
from lora_jax.adapters.plain import to_plain


def meaning(**fields):
    found, faults = read_meaning({"r": 8, "lora_alpha": 16} | fields)
    assert faults == []
    return found


def faults(**fields):
    found, faults = read_meaning({"r": 8, "lora_alpha": 16} | fields)
    assert found is None
    return faults


def test_patterns_follow_vllms_golden_vectors():
    golden = meaning(
        rank_pattern={
            "q_proj": 4,
            "layers.0.q_proj": 2,
            r"^model\.layers\.1\.self_attn\.q_proj": 16,
        },
        alpha_pattern={"k_proj": 32},
    )
    expected = {
        "model.layers.0.q_proj": (4, 4.0),
        "model.layers.1.self_attn.q_proj": (4, 4.0),
        "model.layers.0.xq_proj": (8, 2.0),
        "model.layers.0.k_proj": (8, 4.0),
    }
    found = {}
    for module in expected:
        rank = golden.rank_of(module)
        found[module] = (rank, golden.scale_of(module, rank)[0])
    assert found == expected


def test_a_layer_number_is_no_suffix_of_another():
    part = meaning(alpha_pattern={"1.self_attn.q_proj": 32})
    assert part.alpha_of("model.layers.1.self_attn.q_proj") == 32
    assert part.alpha_of("model.layers.11.self_attn.q_proj") == 16


def test_rslora_divides_by_the_root():
    scale, rule = meaning(use_rslora=True).scale_of("q_proj", 8)
    assert scale == 16 / math.sqrt(8)
    assert rule == "rslora: alpha 16 / sqrt(8)"


PASSING = [
    {"foo": None},
    {"foo": False, "bar": [], "baz": {}, "qux": "", "num": 0},
    {"kasa_config": None, "velora_config": None, "monteclora_config": None},
    {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True},
    {"peft_type": None},
    {"target_modules": "all-linear"},
    {"target_modules": None},
    {"target_modules": []},
    {"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"]},
    {"target_modules": r"(?:.*?(?:language).*?)"},
    {"bias": "none", "lora_bias": False, "use_dora": False, "modules_to_save": None},
    {"fan_in_fan_out": True, "lora_dropout": 0.1, "layers_to_transform": [0, 1]},
    {"init_lora_weights": True},
    {"init_lora_weights": "gaussian"},
    {"init_lora_weights": "Orthogonal"},
    {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
    {"qalora_group_size": 16, "megatron_core": "megatron.core", "runtime_config": {}},
    {"rank_pattern": None, "alpha_pattern": None},
]


@pytest.mark.parametrize("fields", PASSING, ids=str)
def test_a_field_that_changes_nothing_passes(fields):
    assert meaning(**fields).alpha == 16


REFUSED = [
    ({"peft_type": "IA3"}, "peft_type LORA"),
    ({"r": 0}, "whole number above 0"),
    ({"r": -4}, "whole number above 0"),
    ({"r": "8"}, "whole number above 0"),
    ({"r": True}, "whole number above 0"),
    ({"r": 8.0}, "whole number above 0"),
    ({"lora_alpha": None}, "lora_alpha is missing"),
    ({"lora_alpha": float("nan")}, "finite number"),
    ({"lora_alpha": float("inf")}, "finite number"),
    ({"lora_alpha": "16"}, "finite number"),
    ({"use_rslora": "yes"}, "true or false"),
    ({"rank_pattern": {"q_proj": 0}}, "ranks above 0"),
    ({"rank_pattern": {"q_proj": True}}, "ranks above 0"),
    ({"rank_pattern": ["q_proj"]}, "mapping to ranks"),
    ({"rank_pattern": {"q(": 4}}, r"key 'q\(': not a regular expression"),
    ({"alpha_pattern": {"q_proj": "a"}}, "mapping to numbers"),
    ({"target_modules": {"q_proj": 1}}, "text or a list of texts"),
    ({"base_model_name_or_path": 7}, "must be a text"),
    ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
    ({"init_lora_weights": "pissa_niter_16"}, "convert it"),
    ({"init_lora_weights": "OLoRA"}, "convert it"),
    ({"init_lora_weights": "corda"}, "convert it"),
    ({"init_lora_weights": "loftq"}, "convert it"),
    ({"layer_replication": [[0, 2]]}, "layer replication"),
    ({"use_qalora": True}, "QALoRA"),
    ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
    ({"arrow_config": {"top_k": 3}}, "Arrow"),
    ({"kasa_config": {"beta": 1.0}}, "KaSA"),
    ({"monteclora_config": {"samples": 2}}, "MonteCLoRA"),
    ({"enable_lora": [True, False, True]}, "before 0.3"),
    ({"foo": 1}, "foo=1: is not known"),
]


@pytest.mark.parametrize(("fields", "text"), REFUSED, ids=str)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(fields, text):
    (fault,) = faults(**fields)
    assert fault.startswith("config: ")
    assert next(iter(fields)) in fault
    assert re.search(text, fault)


def test_all_faults_come_at_once():
    found = faults(peft_type="IA3", r=0, use_qalora=True, foo="bar")
    assert len(found) == 4


def test_every_field_of_peft_has_a_rule():
    peft_fields = (
        "peft_type task_type inference_mode r target_modules lora_alpha lora_dropout "
        "merge_weights fan_in_fan_out enable_lora bias base_model_name_or_path "
        "modules_to_save init_lora_weights auto_mapping revision layers_to_transform "
        "layers_pattern rank_pattern alpha_pattern megatron_config megatron_core "
        "loftq_config use_rslora use_dora layer_replication runtime_config "
        "exclude_modules eva_config lora_bias trainable_token_indices corda_config "
        "use_qalora qalora_group_size target_parameters peft_version "
        "alora_invocation_tokens arrow_config ensure_weight_tying lora_ga_config "
        "use_bdlora velora_config monteclora_config kasa_config"
    ).split()
    assert sorted(peft_fields) == sorted(RULES)


@pytest.mark.torch
def test_what_peft_itself_writes_by_default_passes():
    import peft

    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    found, faults = read_meaning(to_plain(config.to_dict()))
    assert faults == []
    assert found.targets == ("q_proj", "v_proj")


BY_PEFT = {
    "auto_mapping": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "layers_pattern": None,
    "layers_to_transform": None,
    "revision": None,
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"layers.0.self_attn.q_proj": 32},
}
V14 = {"exclude_modules": None, "eva_config": None, "lora_bias": False}
V15 = {"trainable_token_indices": None, "corda_config": None}
LAYER_0 = "model.layers.0.self_attn.q_proj"

ERAS = [
    (BY_PEFT, 16.0, 8),
    (BY_PEFT | V14, 32.0, 8),
    (BY_PEFT | V14 | V15, 32.0, 2),
    (BY_PEFT | {"peft_version": "0.18.1"}, 32.0, 2),
    ({"alpha_pattern": BY_PEFT["alpha_pattern"]}, 32.0, 2),
]


@pytest.mark.parametrize(("fields", "alpha", "top"), ERAS)
def test_patterns_match_as_in_the_peft_that_wrote_them(fields, alpha, top):
    """Up to 0.13 one look-up served both; up to 0.14 a dot had to come before a key."""
    ranks = {"q_proj": 4, "lm_h.*": 2}
    found = meaning(**fields | {"rank_pattern": ranks})
    assert found.rank_of(LAYER_0) == 4
    assert found.alpha_of(LAYER_0) == alpha
    assert found.rank_of("lm_head") == top
