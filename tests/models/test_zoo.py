"""Which folder becomes which model, and what is said of a folder that becomes none."""

import json

import pytest
from flax import nnx

from lora_jax.errors import ModelError
from lora_jax.models import build_model, read_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
BERT = {**LLAMA, "model_type": "bert"}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (LLAMA, "CausalLM"),
        ({**LLAMA, "architectures": ["LlamaForCausalLM"]}, "CausalLM"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
         "DecoderClassifier"),
        (BERT, "Encoder"),
        ({**BERT, "architectures": ["BertForMaskedLM"]}, "Encoder"),
        ({**BERT, "architectures": ["BertForSequenceClassification"]},
         "BertClassifier"),
        ({**BERT, "model_type": "xlm-roberta",
          "architectures": ["XLMRobertaForSequenceClassification"]},
         "RobertaClassifier"),
    ],
)  # fmt: skip
def test_architectures_decide_the_class(tmp_path, values, kind):
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_config(tmp_path)
    model = nnx.eval_shape(
        lambda: build_model(config, dtype="float32", rngs=nnx.Rngs(0))
    )
    assert type(model).__name__ == kind
    assert model.config == config


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, r"has no config\.json"),
        ("{", "is not JSON"),
        ("[]", "holds list, expected an object"),
        ('{"model_type": "mamba"}', "model_type 'mamba' is not supported; known: bert"),
    ],
)
def test_an_unusable_config_says_so(tmp_path, text, match):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=match):
        read_config(tmp_path)
