"""Names of models that other people wrote."""

import pytest

from helpers import Toy
from lora_jax.config import LoRAConfig
from lora_jax.errors import ConfigError
from lora_jax.layers import wrap
from lora_jax.layers.naming import other_names
from lora_jax.layers.sites import Target

PATHS = ["layers.0.attn.q", "layers.0.attn.qq", "layers.11.attn.q", "head"]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            {"model.layers.*.self_attn": "layers.*.attn"},
            {
                "model.layers.0.self_attn.q": "layers.0.attn.q",
                "model.layers.0.self_attn.qq": "layers.0.attn.qq",
                "model.layers.11.self_attn.q": "layers.11.attn.q",
            },
        ),
        ({"h.1.q": "layers.11.attn.q"}, {"h.1.q": "layers.11.attn.q"}),
        (
            {"h.*.q_proj": "layers.*.attn.q", "lm_head": "head"},
            {
                "h.0.q_proj": "layers.0.attn.q",
                "h.11.q_proj": "layers.11.attn.q",
                "lm_head": "head",
            },
        ),
        ({}, {}),
    ],
)
def test_prefixes_are_exchanged_at_dots(table, expected):
    assert other_names(PATHS, table) == expected


def test_rows_that_cannot_be_used_are_all_named():
    with pytest.raises(ConfigError) as caught:
        other_names(PATHS, {"a.*": "layers.*.*", "b": "layers.0.att"})
    assert str(caught.value).splitlines() == [
        "module_names cannot be used:",
        "  'a.*': 'layers.*.*' has another number of '*'.",
        "  'b': 'layers.0.att' begins no module of the model.",
    ]


def test_an_adapter_finds_a_fused_child_under_its_other_name():
    names = {"model.layers.*.self_attn": "blocks.*"}
    targets = wrap(Toy(), LoRAConfig(module_names=names)).targets
    assert targets["model.layers.1.self_attn.k_proj"] == Target("blocks.1.qkv_proj", 1)
    assert targets["blocks.1.k_proj"] == Target("blocks.1.qkv_proj", 1)
