"""The first adapter of another kind enlarges the bank; nobody who holds it notices."""

import numpy as np

from helpers import Toy, expected_rows, inputs, make_adapter
from lora_jax.adapters import LoRABias
from lora_jax.config import LoRAConfig
from lora_jax.forward import forward, split
from lora_jax.manager import LRUCacheLoRAModelManager
from lora_jax.routing import LoRAMapping


def _with_bias(adapter):
    pair = adapter.parts["blocks.0.fc"]
    bias = np.random.default_rng(7).normal(size=16).astype(np.float32)
    parts = dict(adapter.parts) | {"blocks.0.fc": LoRABias(pair, bias)}
    object.__setattr__(adapter, "parts", parts)
    return adapter


def test_a_held_snapshot_survives_the_growth_and_later_writes_are_in_place():
    model = Toy()
    manager = LRUCacheLoRAModelManager(
        model, LoRAConfig(max_loras=2, max_cpu_loras=4, max_lora_rank=8)
    )
    plain, other = make_adapter(1, 4), make_adapter(3, 4)
    for adapter in (plain, _with_bias(make_adapter(2, 4)), other):
        manager.add_adapter(adapter)
    manager.activate_adapter(1)
    x = inputs(3)
    manager.set_adapter_mapping(LoRAMapping((1, 0, 1), (1,)))
    held = manager.snapshot()
    expected = expected_rows(Toy(), [plain, None, plain], x)
    np.testing.assert_allclose(model(x), expected, atol=1e-5)
    manager.activate_adapter(2)
    manager.set_adapter_mapping(LoRAMapping((1, 2, 2), (1,)))
    mixed = np.asarray(model(x))
    np.testing.assert_allclose(mixed[0], expected[0], atol=1e-5)
    plain_two = expected_rows(Toy(), [None, make_adapter(2, 4), None], x)[1]
    assert np.abs(mixed[1] - plain_two).max() > 1e-3
    graphdef, weights = split(model)
    copied = manager.stats.copied_writes
    manager.activate_adapter(3)
    manager.activate_adapter(1)
    assert manager.stats.copied_writes == copied
    np.testing.assert_allclose(
        forward(graphdef, weights, held.bank, held.routing, x), expected, atol=1e-5
    )
