"""Whose rows a layer sees, and whether that part of the model is adapted at all.

A multimodal model says so in a class attribute, by path:

    lora_domains = {"visual": "tower", "visual.merger": "connector"}

The longest prefix decides; what no prefix names belongs to the language model. Tower
and connector are adapted only with `enable_tower_connector_lora`.
"""

from collections.abc import Mapping

from lora_jax.config import LoRAConfig
from lora_jax.errors import ConfigError, faults
from lora_jax.shapes import CONNECTOR, TOWER

VISION = frozenset({TOWER, CONNECTOR})
"""Domains that only multimodal models have."""


def domain_of(name: str, prefixes: Mapping[str, str], default: str) -> str:
    """Returns the domain of the longest prefix, at a dot, that the model names.

    Example:
      >>> prefixes = {"visual": "tower", "visual.merger": "connector"}
      >>> [domain_of(name, prefixes, "tokens")
      ...  for name in ("visual.proj", "visual.merger.fc", "visualizer")]
      ['tower', 'connector', 'tokens']
    """
    hits = [prefix for prefix in prefixes if f"{name}.".startswith(f"{prefix}.")]
    return prefixes[max(hits, key=len)] if hits else default


def is_left_out(domain: str, config: LoRAConfig) -> bool:
    """Says whether layers of a domain stay without LoRA under these options."""
    return domain in VISION and not config.enable_tower_connector_lora


def check_multimodal(
    model_name: str, prefixes: Mapping[str, str], config: LoRAConfig
) -> None:
    """Refuses options of multimodal models on a model that is none.

    Raises:
      ConfigError: naming each such option.
    """
    if VISION & set(prefixes.values()):
        return
    found = []
    if config.default_mm_loras:
        found.append(
            "Default modality-specific LoRA(s) were provided for a non multimodal "
            "model; leave default_mm_loras out."
        )
    if config.enable_tower_connector_lora:
        found.append(
            "enable_tower_connector_lora is set, but the model has neither tower nor "
            "connector; switch it off, or name them in its `lora_domains`."
        )
    if found:
        raise ConfigError(faults(f"LoRAConfig does not fit {model_name}:", found))
