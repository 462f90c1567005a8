"""What a config.json means, in every spelling, and how it is refused."""

import pytest

from lora_jax.errors import ModelError
from lora_jax.models.config import config_from_dict
from lora_jax.models.rotary import DefaultRotary, LinearRotary, Llama3Rotary, YarnRotary

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def read(**values: object):
    return config_from_dict(values, origin="config.json")


def test_what_a_llama_config_leaves_out_has_transformers_defaults():
    config = read(**LLAMA)
    assert config.num_key_value_heads == 4
    assert config.head_dim == 8
    assert config.norm_eps == 1e-6
    assert config.max_position_embeddings == 2048
    assert config.rotaries == (DefaultRotary(10000.0, 8),) * 3
    assert config.windows == (None, None, None)
    assert not config.tie_word_embeddings


def test_families_differ_in_what_they_leave_out():
    assert read(**MISTRAL, num_key_value_heads=2).windows == (4096,) * 3
    assert read(**MISTRAL, num_key_value_heads=None).num_key_value_heads == 4
    assert read(
        **{
            **LLAMA,
            "model_type": "qwen2",
            "architectures": None,
            "num_key_value_heads": 2,
        }
    ).qkv_bias
    qwen3 = read(**QWEN3, num_key_value_heads=2)
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias) == (128, "head", False)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
LLAMA3_ROTARY = Llama3Rotary(5e5, 8, 8.0, 512, 1.0, 4.0)


@pytest.mark.parametrize(
    ("values", "rotary"),
    [
        ({"rope_theta": 5e5}, DefaultRotary(5e5, 8)),
        ({"rope_theta": 5e5, "rope_scaling": None}, DefaultRotary(5e5, 8)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
         DefaultRotary(5e5, 8)),
        ({"rope_scaling": {"type": "linear", "factor": 2}},
         LinearRotary(1e4, 8, 2.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
         LLAMA3_ROTARY),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
         LLAMA3_ROTARY),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
          "max_position_embeddings": 64},
         YarnRotary(1e4, 8, 4.0, 64, 32.0, 1.0, True, attention_factor=1.5)),
        ({"partial_rotary_factor": 0.5}, DefaultRotary(1e4, 4)),
    ],
)  # fmt: skip
def test_both_spellings_of_the_rotary_embedding_are_read(values, rotary):
    assert read(**LLAMA, **values).rotaries == (rotary,) * 3


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 7}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
         (None, 7, 7)),
        ({"use_sliding_window": True, "sliding_window": 7,
          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
         (7, None, 7)),
    ],
)  # fmt: skip
def test_windows_follow_layer_types(values, windows):
    assert read(**QWEN3, num_key_value_heads=4, **values).windows == windows


FAULTS = {
    "missing": ({"hidden_size": None}, "hidden_size: found None, expected a positive"),
    "not a number": ({"vocab_size": "96"}, "vocab_size: found '96'"),
    "activation": ({"hidden_act": "xielu"}, "hidden_act: found 'xielu', expected one"),
    "groups": ({"num_key_value_heads": 3}, "3 does not divide num_attention_heads 4"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}},
                "rope_type: found 'dynamic', expected one of default"),
    "no factors": ({"rope_parameters": {"rope_type": "longrope"}},
                   "short_factor: expected a list of 4 positive numbers"),
    "few factors": ({"rope_scaling": {"type": "su", "short_factor": [1.0]}},
                    "short_factor: expected a list of 4 positive numbers"),
    "phi3 yarn": ({"model_type": "phi3", "architectures": None,
                   "rope_scaling": {"type": "yarn", "factor": 2.0}}, "found 'yarn'"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "factor: found nothing"),
    "scaling": ({"rope_scaling": [2.0]}, r"rope_scaling: found \[2.0\]"),
    "odd rotation": ({"partial_rotary_factor": 0.4}, "rotates 3 features of a head"),
    "bounds": ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
               "low_freq_factor 4.0 must be below"),
    "layer kinds": ({"layer_types": ["full_attention", "chunked", "full_attention"]},
                    "layer_types has 'chunked'; supported"),
    "layer count": ({"layer_types": ["full_attention"]}, "must list num_hidden_layers"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config: quant"),
    "architecture": ({"architectures": ["LlamaForTokenClassification"]},
                     "architectures has 'LlamaForTokenClassification'"),
    "architectures": ({"architectures": "Llama"}, "architectures must be a list"),
    "flag": ({"mlp_bias": "no"}, "mlp_bias: found 'no', expected a boolean"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_what_cannot_be_computed_is_refused_by_name(case):
    values, text = FAULTS[case]
    with pytest.raises(ModelError, match=text):
        read(**{**LLAMA, **values})


def test_all_faults_are_named_at_once():
    with pytest.raises(ModelError) as error:
        read(**{**LLAMA, "vocab_size": 0, "rms_norm_eps": None, "hidden_act": "x"})
    for name in ("vocab_size", "rms_norm_eps", "hidden_act"):
        assert name in str(error.value)


def test_longrope_keeps_the_original_context():
    scaling = {"type": "longrope", "short_factor": [1, 1, 2, 2], "factor": 4.0}
    config = read(
        **{**LLAMA, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"]},
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_scaling=scaling,
    )
    assert config.max_position_embeddings == 32
    assert config.rotaries[0].attention_factor == pytest.approx(1.4**0.5)


def test_an_unknown_model_type_names_the_known_ones():
    with pytest.raises(ModelError, match="model_type 'mamba' is not supported; known"):
        read(**{**LLAMA, "model_type": "mamba"})


def test_a_classifier_has_the_labels_of_its_config():
    values = {**LLAMA, "architectures": ["LlamaForSequenceClassification"]}
    named = read(**values, id2label={"1": "good", "0": "bad"})
    assert (named.head, named.labels) == ("classifier", ("bad", "good"))
    assert read(**values, num_labels=3).labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert read(**values).labels == ("LABEL_0", "LABEL_1")
    with pytest.raises(ModelError, match=r"id2label has ids \['0', '2'\], expected"):
        read(**values, id2label={"0": "a", "2": "b"})
