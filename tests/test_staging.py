"""Flat buffers: one for each dtype, padded, in an order that names cannot change."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from helpers import Toy, make_adapter
from lora_jax.config import LoRAConfig
from lora_jax.layers import wrap
from lora_jax.packing import Packed, pack
from lora_jax.staging import Place, in_order, slot_layout, stage_slot

FLOAT32 = np.dtype("float32")
LAYOUT = {
    name: {
        "rank": jax.ShapeDtypeStruct((1,), np.int32),
        "a": jax.ShapeDtypeStruct((2, 3), np.float32),
    }
    for name in ("layer.10", "layer.2")
}


def test_values_sit_in_the_corner_of_their_place_and_the_rest_is_zeros():
    values = {"a": np.full((1, 3), 7, np.float32), "rank": np.ones(1, np.int32)}
    staged = stage_slot(LAYOUT, Packed("x", {"layer.2": values}, {}))
    assert {name: buffer.tolist() for name, buffer in staged.items()} == {
        "float32": [0] * 6 + [7] * 3 + [0] * 3,
        "int32": [0, 1],
    }


def test_spread_experts_have_buffers_of_their_own_with_an_axis_of_experts():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("expert",))
    spread = NamedSharding(mesh, PartitionSpec("expert"))
    layout = LAYOUT | {
        "layer.3": {
            "a": jax.ShapeDtypeStruct((2, 3), np.float32, sharding=spread),
            "b": jax.ShapeDtypeStruct((2, 1, 2), np.float32, sharding=spread),
        }
    }
    values = {
        "a": np.full((2, 2), 7, np.float32),
        "b": np.full((2, 1, 1), 8, np.float32),
    }
    staged = stage_slot(layout, Packed("x", {"layer.3": values}, {}))
    assert {name: buffer.shape for name, buffer in staged.items()} == {
        "float32": (12,),
        "int32": (2,),
        "float32, 2 experts": (2, 5),
    }
    assert staged["float32, 2 experts"].tolist() == [[7, 7, 0, 8, 0]] * 2
    whole = NamedSharding(mesh, PartitionSpec())
    place = Place(whole, spread)
    assert place.of(staged) == {
        "float32": whole,
        "int32": whole,
        "float32, 2 experts": spread,
    }
    sent = place.put(staged)["float32, 2 experts"]
    assert [s.data.shape for s in sent.addressable_shards] == [(1, 5), (1, 5)]


def test_the_order_is_that_of_sorted_names():
    found = [(name, key) for name, key, _ in in_order(LAYOUT)]
    assert found == sorted(found)
    assert found == [(n, k) for n, k, _ in in_order(dict(reversed(LAYOUT.items())))]


def test_every_adapter_has_the_same_shapes():
    sites = wrap(Toy(), LoRAConfig(max_lora_rank=8))
    layout = slot_layout(sites, FLOAT32)
    shapes = {
        tuple(
            (name, buffer.shape)
            for name, buffer in stage_slot(
                layout, pack(adapter, sites, FLOAT32)
            ).items()
        )
        for adapter in (
            make_adapter(1, 8),
            make_adapter(2, 1, modules=["blocks.1.k_proj"]),
        )
    }
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("key", "shape"), [("a", (3, 3)), ("bias", (4,)), ("rank", (2,))]
)
def test_values_without_a_place_are_an_error(key, shape):
    packed = Packed("x", {"layer.2": {key: np.zeros(shape, np.float32)}}, {})
    with pytest.raises(ValueError, match=rf"layer\.2 has no room for {key}"):
        stage_slot(LAYOUT, packed)
