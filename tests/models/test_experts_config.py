"""What a config.json says of experts, in every spelling, and how it is refused."""

import pytest

from lora_jax.errors import ModelError
from lora_jax.models.config import config_from_dict
from lora_jax.models.rotary import YarnRotary

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def read(model_type: str, **values: object):
    return config_from_dict(
        {**SIZES, "model_type": model_type, **values}, origin="config.json"
    )


DEFAULTS = {
    "mixtral": (8, 2, 48, 0, "gate", "softmax_top", True, "silu"),
    "qwen2_moe": (60, 4, 1408, 5632, "shared", "softmax_top", False, "silu"),
    "qwen3_moe": (128, 8, 768, 0, "gate", "softmax_top", False, "silu"),
    "olmoe": (64, 8, 48, 0, "gate", "softmax_top", False, "silu"),
    "gpt_oss": (128, 4, 48, 0, "router", "top_softmax", False, "swiglu_oai"),
}


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_what_a_config_leaves_out_has_transformers_defaults(model_type):
    experts = read(model_type).experts
    assert experts is not None
    assert (
        experts.num_experts,
        experts.num_experts_per_tok,
        experts.intermediate_size,
        experts.shared_intermediate_size,
        experts.block,
        experts.choice,
        experts.normalized,
        experts.activation,
    ) == DEFAULTS[model_type]
    assert experts.layers == (True,) * 4


def test_a_dense_family_has_no_experts():
    config = read("llama")
    assert config.experts is None
    assert config.layers_with_experts == (False,) * 4


@pytest.mark.parametrize("model_type", DEFAULTS)
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_either_name_of_the_number_of_experts_is_read(model_type, key):
    experts = read(model_type, **{key: 16}).experts
    assert experts is not None
    assert experts.num_experts == 16


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2},
         (False, False, False, True)),
        ({"mlp_only_layers": None}, (True,) * 4),
    ],
)  # fmt: skip
def test_some_layers_may_be_dense(values, layers):
    assert read("qwen3_moe", **values).layers_with_experts == layers


@pytest.mark.parametrize(
    ("model_type", "values", "windows"),
    [
        ("mixtral", {}, (None,) * 4),
        ("mixtral", {"sliding_window": 7}, (7,) * 4),
        ("qwen2_moe", {"sliding_window": 7}, (None,) * 4),
        ("qwen2_moe", {"sliding_window": 7, "use_sliding_window": True,
                       "max_window_layers": 2}, (7, None, None, None)),
        ("qwen3_moe", {"sliding_window": 7}, (None,) * 4),
        ("qwen3_moe", {"sliding_window": 7, "use_sliding_window": True}, (7,) * 4),
        ("gpt_oss", {}, (128, None, 128, None)),
        ("gpt_oss", {"layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
)  # fmt: skip
def test_windows_are_those_of_the_family(model_type, values, windows):
    assert read(model_type, **values).windows == windows


def test_gpt_oss_has_sinks_biases_and_a_stretched_context():
    config = read("gpt_oss")
    assert (config.sinks, config.qkv_bias, config.o_bias) == (True, True, True)
    rotary = config.rotaries[0]
    assert isinstance(rotary, YarnRotary)
    assert (rotary.theta, rotary.factor, rotary.truncate) == (150000.0, 32.0, False)


def test_olmoe_norms_whole_queries_and_bounds_them():
    config = read("olmoe", clip_qkv=5.0)
    assert (config.qk_norm, config.clip_qkv) == ("whole", 5.0)
    assert read("olmoe", clip_qkv=None).clip_qkv is None


FAULTS = {
    "too many chosen": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5},
                        "num_experts_per_tok 5 exceeds the number of experts, 4"),
    "no experts": ("qwen3_moe", {"num_experts": 0}, "num_experts: found 0, expected"),
    "dense layers": ("qwen2_moe", {"mlp_only_layers": "0,1"},
                     "mlp_only_layers: found '0,1', expected a list of layers"),
    "normalised": ("olmoe", {"norm_topk_prob": "yes"},
                   "norm_topk_prob: found 'yes', expected a boolean"),
    "limit": ("gpt_oss", {"swiglu_limit": 5.0},
              "swiglu_limit: found 5.0, supported: None, 7.0"),
    "mxfp4": ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}},
              r"mxfp4 weights are not supported; load the model in transformers with "
              r"quantization_config=Mxfp4Config\(dequantize=True\), and save it"),
    "fp8": ("qwen3_moe", {"quantization_config": {"quant_method": "fp8"}},
            "fp8 weights are not supported; use the float16, bfloat16 or float32"),
    "olmoe classifier": ("olmoe", {"architectures": ["OlmoeForTokens"]},
                         "architectures has 'OlmoeForTokens'; supported"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_what_cannot_be_computed_is_refused_by_name(case):
    model_type, values, text = FAULTS[case]
    with pytest.raises(ModelError, match=text):
        read(model_type, **values)
