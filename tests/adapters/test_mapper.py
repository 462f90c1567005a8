"""A model's own names: renamed after the build, skipped before it."""

import numpy as np
import pytest

from adapter_files import UP, Q, config, pair
from lora_jax.adapters import NameMapper, adapter_from_tensors
from lora_jax.errors import AdapterError

MTP = "mtp.layers.0.mlp.up_proj"


def read(tensors, mapper, **fields):
    return adapter_from_tensors(tensors, config(**fields), name="a", mapper=mapper)


def test_patterns_see_the_files_names_and_parts_have_the_models():
    mapper = NameMapper(prefixes={"model.": "language."}, substrings={"mlp": "ffn"})
    adapter = read(pair(Q, 4) | pair(UP, 4), mapper, alpha_pattern={"mlp.up_proj": 4})
    names = ["language.layers.0.ffn.up_proj", "language.layers.0.self_attn.q_proj"]
    assert list(adapter.parts) == names
    assert adapter.parts[names[0]].scale == 1.0
    assert [row.module for row in adapter.report.modules] == [UP, Q]


def test_a_skipped_prefix_is_ignored_and_told():
    adapter = read(pair(Q, 4) | pair(MTP, 4), NameMapper(skip_prefixes=("mtp.",)))
    assert list(adapter.parts) == [Q]
    reasons = {item.reason for item in adapter.report.ignored}
    assert reasons == {"the model skips this prefix"}
    assert (adapter.report.matched, adapter.report.total) == (2, 4)


def test_an_adapter_of_skipped_tensors_alone_would_change_nothing():
    with pytest.raises(AdapterError, match="no LoRA tensor in it"):
        read(pair(MTP, 4), NameMapper(skip_prefixes=("mtp.",)))


def test_two_modules_of_one_name_are_refused():
    mapper = NameMapper(substrings={"q_proj": "x", "up_proj": "x", "mlp": "self_attn"})
    with pytest.raises(AdapterError, match="has the model's name"):
        read(pair(Q, 4) | pair(UP, 4), mapper)


def test_an_untrained_adapter_is_noted():
    tensors = pair(Q, 4)
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name] = np.zeros_like(tensors[name])
    adapter = read(tensors, None)
    assert adapter.report.notes == (
        "every update is zero, so the adapter changes nothing",
    )
