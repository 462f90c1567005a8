"""Options of multimodal models are refused on a model that is none."""

import pytest

from lora_jax.config import LoRAConfig
from lora_jax.errors import ConfigError
from lora_jax.layers.domains import check_multimodal


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"default_mm_loras": {"audio": "dir"}},
            r"Default modality-specific LoRA\(s\) were provided for a non multimodal",
        ),
        ({"enable_tower_connector_lora": True}, "neither tower nor connector"),
        (
            {"default_mm_loras": {"image": "dir"}, "enable_tower_connector_lora": True},
            "(?s)does not fit Toy.*non multimodal model.*neither tower",
        ),
    ],
)
def test_options_for_other_models_are_named(options, text):
    with pytest.raises(ConfigError, match=text):
        check_multimodal("Toy", {}, LoRAConfig(**options))
    check_multimodal("Vision", {"visual": "tower"}, LoRAConfig(**options))
