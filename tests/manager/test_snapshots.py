"""A decode goes on undisturbed while adapters are loaded, evicted and reloaded.

Each step is given a snapshot; requests hold their adapters. Compared token by token
with a run in which nothing else happens.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax.adapters import Adapter, adapter_from_tensors
from lora_jax.bank import Bank
from lora_jax.config import LoRAConfig
from lora_jax.forward import merge, split
from lora_jax.manager import LRUCacheLoRAModelManager
from lora_jax.routing import routing_from_slots
from lora_jax.rules import ALL_KEPT
from tiny_llama import adapter_config, adapter_tensors, tiny_model

TIME, STEPS = 16, 12
PROMPTS = [[5, 9, 2], [7, 1, 30], [5, 9, 2]]


def _adapter(seed: int, rank: int, id: int) -> Adapter:
    config = adapter_config(rank)
    tensors = adapter_tensors(seed, rank)
    return adapter_from_tensors(tensors, config, name=f"a{seed}", adapter_id=id)


ADAPTERS = {id: _adapter(id, 1 + 2 * id, id) for id in (1, 2, 3, 4)}
NEW = _adapter(11, 4, 1)
"""Another version of adapter 1."""


class Decoder:
    """Greedy decoding of three rows: adapter 1, adapter 2, base; one program."""

    def __init__(self, slots: int) -> None:
        self.model = tiny_model()
        config = LoRAConfig(max_loras=slots, max_cpu_loras=4, max_lora_rank=16)
        self.manager = LRUCacheLoRAModelManager(self.model, config)
        for adapter in ADAPTERS.values():
            self.manager.add_adapter(adapter)
        self.graphdef, self.weights = split(self.model)
        self.step = jax.jit(self._step)

    def _step(
        self, weights: nnx.State, bank: Bank, slots: jax.Array, tokens: jax.Array
    ) -> jax.Array:
        routing = routing_from_slots(jnp.repeat(slots, TIME), self.manager.lora_slots)
        return merge(self.graphdef, weights, bank, routing)(tokens)

    def run(self, disturb: Callable[[int], None]) -> np.ndarray:
        """Returns `(rows, steps)` tokens; `disturb` is called while a step runs."""
        manager = self.manager
        holds = [manager.hold(1), manager.hold(2)]
        slots = jnp.asarray([*(hold.slot for hold in holds), -1], jnp.int32)
        tokens = np.zeros((len(PROMPTS), TIME), np.int32)
        tokens[:, :3] = PROMPTS
        for step in range(STEPS):
            snapshot = manager.snapshot()
            logits = self.step(self.weights, snapshot.bank, slots, jnp.asarray(tokens))
            if step % 2:  # Held, a write copies the bank; dropped, it is in place.
                del snapshot
            disturb(step)
            tokens[:, 3 + step] = np.asarray(logits)[:, 2 + step].argmax(-1)
        for hold in holds:
            assert manager.release(hold)
        return tokens[:, 3 : 3 + STEPS]


def _swap(decoder: Decoder, step: int) -> None:
    decoder.manager.activate_adapter(3 + step % 2)


def _reload(decoder: Decoder, step: int) -> None:
    version = (NEW, ADAPTERS[1])[step % 2]
    manager = decoder.manager
    manager.replace_prepared(manager.prepare(version))
    _swap(decoder, step)
    manager.activate_adapter(1)


def _remove(decoder: Decoder, step: int) -> None:
    manager = decoder.manager
    manager.remove_adapter(1 + step % 2)
    _swap(decoder, step)
    if step % 4 == 3:
        manager.remove_all_adapters()
        for adapter in ADAPTERS.values():
            manager.add_adapter(adapter)


@pytest.fixture(scope="module")
def undisturbed() -> np.ndarray:
    runs = [Decoder(3).run(lambda step: None) for _ in range(2)]
    np.testing.assert_array_equal(runs[0], runs[1])
    tokens = runs[0]
    assert len({tuple(row) for row in tokens}) == 3, "the adapters must show"
    return tokens


@pytest.mark.parametrize("disturb", [_swap, _reload, _remove])
def test_requests_in_flight_get_the_same_tokens(
    disturb: Callable[[Decoder, int], None], undisturbed: np.ndarray
) -> None:
    decoder = Decoder(3)
    tokens = decoder.run(lambda step: disturb(decoder, step))
    np.testing.assert_array_equal(tokens, undisturbed)
    assert decoder.step._cache_size() == 1
    stats = decoder.manager.stats
    assert stats.writes > STEPS
    assert 0 < stats.copied_writes < stats.writes


def test_with_all_slots_held_a_load_is_refused_and_nobody_notices(
    undisturbed: np.ndarray,
) -> None:
    decoder, refusals = Decoder(2), []

    def load(step: int) -> None:
        assert not decoder.manager.can_activate([3])
        with pytest.raises(RuntimeError) as refusal:
            decoder.manager.activate_adapter(3)
        refusals.append(str(refusal.value))

    np.testing.assert_array_equal(decoder.run(load), undisturbed)
    assert refusals == [ALL_KEPT] * STEPS
    assert decoder.manager.activate_adapter(3)


def test_the_reloaded_version_serves_the_next_request(undisturbed: np.ndarray) -> None:
    decoder = Decoder(3)
    decoder.manager.replace_prepared(decoder.manager.prepare(NEW))
    tokens = decoder.run(lambda step: None)
    np.testing.assert_array_equal(tokens[1:], undisturbed[1:])
    assert (tokens[0] != undisturbed[0]).any()
