"""Adapter to host arrays: complete, exact, or one error that names everything."""

import numpy as np
import pytest

from helpers import Toy, make_adapter
from lora_jax.adapters import LowRank, adapter_from_tensors
from lora_jax.config import LoRAConfig
from lora_jax.errors import AdapterError
from lora_jax.layers import wrap
from lora_jax.packing import pack

FLOAT32 = np.dtype("float32")


def _sites(max_lora_rank=8):
    return wrap(Toy(), LoRAConfig(max_lora_rank=max_lora_rank))


def test_values_are_the_files_own_at_the_adapters_own_rank():
    adapter = make_adapter(1, 3, ranks={"blocks.0.k_proj": 2}, alpha=12.0)
    packed = pack(adapter, _sites(), FLOAT32)
    slot = packed.sites["blocks.0.qkv_proj"]
    q, k = adapter.parts["blocks.0.q_proj"], adapter.parts["blocks.0.k_proj"]
    assert {key: array.shape for key, array in slot.items()} == {
        "a": (3, 3, 16),
        "b": (3, 20),
        "scale": (3,),
        "rank": (3,),
    }
    np.testing.assert_array_equal(slot["a"][0], q.a)
    np.testing.assert_array_equal(slot["a"][1], np.pad(k.a, ((0, 1), (0, 0))))
    np.testing.assert_array_equal(slot["b"][:2, 12:16], k.b.T)
    np.testing.assert_array_equal(slot["rank"], [3, 2, 3])
    np.testing.assert_array_equal(slot["scale"], np.float32([4, 6, 4]))


def test_packing_does_not_change_the_adapter():
    adapter = make_adapter(1, 4)
    before = {
        name: (pair.a.copy(), pair.b.copy()) for name, pair in adapter.parts.items()
    }
    pack(adapter, _sites(), FLOAT32)
    for name, (a, b) in before.items():
        np.testing.assert_array_equal(adapter.parts[name].a, a)
        np.testing.assert_array_equal(adapter.parts[name].b, b)


def test_sites_without_weights_take_no_memory():
    packed = pack(make_adapter(1, 4, modules=["blocks.1.fc"]), _sites(), FLOAT32)
    assert set(packed.sites) == {"blocks.1.fc"}
    assert packed.nbytes == 4 * (4 * 16 + 4 * 16 + 1 + 1)
    assert packed.placed == {"blocks.1.fc": "blocks.1.fc"}


def test_every_fault_is_in_one_error():
    tensors = {
        "blocks.0.q_proj.lora_A.weight": np.ones((9, 16), "f4"),
        "blocks.0.q_proj.lora_B.weight": np.ones((12, 9), "f4"),
        "blocks.0.fc.lora_A.weight": np.ones((2, 15), "f4"),
        "blocks.0.fc.lora_B.weight": np.ones((16, 2), "f4"),
        "blocks.7.up_proj.lora_A.weight": np.ones((2, 16), "f4"),
        "blocks.7.up_proj.lora_B.weight": np.ones((16, 2), "f4"),
    }
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["fc"]}
    config["rank_pattern"] = {"q_proj": 9}
    adapter = adapter_from_tensors(tensors, config, name="bad")
    with pytest.raises(AdapterError) as caught:
        pack(adapter, _sites(), FLOAT32)
    text = str(caught.value)
    assert text.startswith("adapter 'bad' cannot be served by this model:")
    assert "blocks.7.up_proj: not a module that this model can adapt." in text
    assert "blocks.0.q_proj: rank 9 exceeds max_lora_rank=8" in text
    assert "blocks.0.fc: lora_A has input width 15, the layer has 16." in text
    assert "1 of 3 modules have no place; this model" in text


def _parts(modules):
    """Parts of rank 2 for modules of the toy model, whatever path names them."""
    widths = {"qkv_proj": 20, "k_proj": 4, "fc": 16, "shared": 16}
    return {
        name: LowRank(
            np.ones((2, 16), "f4"),
            np.ones((widths[name.rpartition(".")[2]], 2), "f4"),
            1.0,
        )
        for name in modules
    }


@pytest.mark.parametrize(
    "modules",
    [("blocks.0.qkv_proj", "blocks.0.k_proj"), ("blocks.0.fc", "shared")],
)
def test_one_place_named_twice_is_refused(modules):
    adapter = make_adapter(1, 2)
    object.__setattr__(adapter, "parts", _parts(modules))
    with pytest.raises(AdapterError, match="has this place too"):
        pack(adapter, _sites(), FLOAT32)


def test_an_alias_alone_is_a_name_like_any_other():
    adapter = make_adapter(1, 2)
    object.__setattr__(adapter, "parts", _parts(["shared"]))
    packed = pack(adapter, _sites(), FLOAT32)
    assert packed.placed == {"shared": "blocks.0.fc"}


def test_values_that_the_bank_cannot_hold_are_refused():
    adapter = make_adapter(1, 2, modules=["blocks.0.fc"])
    pair = adapter.parts["blocks.0.fc"]
    large = LowRank(pair.a * np.float32(1e6), pair.b, pair.scale)
    object.__setattr__(adapter, "parts", {"blocks.0.fc": large})
    with pytest.raises(AdapterError, match=r"fc: lora\.a has values up to"):
        pack(adapter, _sites(), np.dtype("float16"))
