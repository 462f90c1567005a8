"""Configs of Python become what their JSON would be."""

import dataclasses
from enum import StrEnum

import numpy as np

from adapter_files import Q, config, pair
from lora_jax.adapters import adapter_from_tensors
from lora_jax.adapters.plain import to_plain


class Kind(StrEnum):
    LORA = "LORA"


@dataclasses.dataclass
class Inner:
    rho: float = 2.0


def test_every_value_of_pythons_has_its_plain_form():
    given = {
        "peft_type": Kind.LORA,
        "target_modules": {"b", "a"},
        "layer_replication": ((0, 2),),
        "r": np.int64(4),
        "eva_config": Inner(),
        "nested": {"alpha": np.float32(0.5)},
        "other": None,
    }
    assert to_plain(given) == {
        "peft_type": "LORA",
        "target_modules": ["a", "b"],
        "layer_replication": [[0, 2]],
        "r": 4,
        "eva_config": {"rho": 2.0},
        "nested": {"alpha": 0.5},
        "other": None,
    }


def test_an_adapter_takes_such_a_config():
    fields = config(peft_type=Kind.LORA, r=np.int64(4), target_modules={"q_proj"})
    adapter = adapter_from_tensors(pair(Q, 4), fields, name="a")
    assert adapter.config["target_modules"] == ["q_proj"]
