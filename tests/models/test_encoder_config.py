"""What a BERT-like config.json means, and how it is refused."""

import pytest

from lora_jax.errors import ModelError
from lora_jax.models.encoder_config import encoder_config

BERT = {
    "model_type": "bert",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def read(**values: object):
    return encoder_config({**BERT, **values}, origin="config.json")


def test_what_is_left_out_has_transformers_defaults():
    config = read()
    assert (config.hidden_act, config.norm_eps) == ("gelu", 1e-12)
    assert (config.max_tokens, config.type_vocab_size) == (512, 2)
    assert (config.head, config.has_pooler, config.head_dim) == ("none", True, 8)


def test_roberta_counts_positions_from_its_padding():
    config = read(model_type="roberta", max_position_embeddings=514)
    assert (config.first_position, config.max_tokens) == (2, 512)
    assert read(model_type="xlm-roberta", pad_token_id=5).first_position == 6


FAULTS = {
    "heads": ({"num_attention_heads": 5}, "5 does not divide hidden_size 32"),
    "positions": ({"position_embedding_type": "relative_key"}, "found 'relative_key'"),
    "decoder": ({"is_decoder": True}, "is_decoder: found True, supported: False"),
    "cross": ({"add_cross_attention": True}, "add_cross_attention: found True"),
    "quantised": ({"quantization_config": {}}, "quantised weights are not"),
    "architecture": ({"architectures": ["BertForQuestionAnswering"]},
                     "architectures has 'BertForQuestionAnswering'; supported: BertMo"),
    "another family": ({"architectures": ["RobertaModel"]}, "has 'RobertaModel'"),
    "padding": ({"model_type": "roberta", "pad_token_id": -1},
                "pad_token_id: found -1, expected a whole number of at least 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_what_cannot_be_computed_is_refused_by_name(case):
    values, text = FAULTS[case]
    with pytest.raises(ModelError, match=text):
        read(**values)
