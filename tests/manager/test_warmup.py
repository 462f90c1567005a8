"""Dummies on every layer, and nothing left to compile after the warm-up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers import TOLERANCE, Toy, expected_rows, inputs, make_adapter
from lora_jax.config import LoRAConfig
from lora_jax.forward import forward, split
from lora_jax.manager import LRUCacheLoRAModelManager
from lora_jax.routing import LoRAMapping
from lora_jax.serving.compilations import CompilationCounter

CONFIG = LoRAConfig(max_loras=3, max_cpu_loras=4, max_lora_rank=8)
BUCKETS = (2, 6)


class Headed(nnx.Module):
    """An embedding, a layer and a head."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed_tokens = nnx.Embed(7, 4, rngs=rngs)
        self.up = nnx.Linear(4, 4, rngs=rngs)
        self.lm_head = nnx.Linear(4, 7, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.lm_head(self.up(self.embed_tokens(tokens)))


def test_a_dummy_covers_every_child_of_every_layer_once() -> None:
    manager = LRUCacheLoRAModelManager(Toy(), CONFIG)
    dummy = manager.create_dummy_lora(9, 4)
    assert (dummy.id, dummy.rank, len(dummy.parts)) == (9, 4, 10)
    manager.add_adapter(dummy)
    manager.activate_adapter(9)
    assert all(int(s["rank"][0].min()) == 4 for s in manager.bank.arrays.values())
    manager.set_adapter_mapping(LoRAMapping((9, 9), (9, 9)))
    np.testing.assert_array_equal(manager.model(inputs(2)), Toy()(inputs(2)))


@pytest.mark.parametrize(
    ("embeddings", "modules"),
    [((), {"up", "lm_head"}), (("embed_tokens",), {"embed_tokens", "up", "lm_head"})],
)
def test_a_dummy_covers_the_head_and_asked_for_embeddings(
    embeddings: tuple[str, ...], modules: set[str]
) -> None:
    manager = LRUCacheLoRAModelManager(Headed(), CONFIG)
    dummy = manager.create_dummy_lora(9, 2, embeddings)
    assert set(dummy.parts) == modules
    manager.add_adapter(dummy)
    assert manager.activate_adapter(9)


@pytest.mark.parametrize(("default", "rank"), [(8, 8), (4, 4), (64, 8)])
def test_the_warmup_rank_stays_within_the_slots(default: int, rank: int) -> None:
    manager = LRUCacheLoRAModelManager(Toy(), CONFIG)
    assert manager.get_dummy_lora_warmup_rank(default) == rank


def test_nothing_compiles_after_the_warmup() -> None:
    manager = LRUCacheLoRAModelManager(Toy(), CONFIG)
    graphdef, weights = split(manager.model)
    step = jax.jit(forward, static_argnums=0)
    batches = {rows: inputs(rows) for rows in BUCKETS}

    def run(rows: int) -> jax.Array:
        state = manager.snapshot()
        return step(graphdef, weights, state.bank, state.routing, batches[rows])

    manager.warmup(BUCKETS, run)
    assert manager.lora_index_to_id == [None] * 3
    assert len(manager) == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(manager.bank))
    adapters = {
        1: make_adapter(1, 8),
        2: make_adapter(2, 1, modules=["blocks.0.q_proj"]),
        3: make_adapter(3, 5),
        4: make_adapter(4, 3),
        5: make_adapter(5, 2),
    }
    outputs = {}
    with CompilationCounter() as counter:
        for ids in ((1, 0), (1, 2, 3, 0, 1, 2), (0, 0), (4, 5), (1, 1, 2, 2, 0, 0)):
            for id in {*ids} - {0}:
                manager.add_adapter(adapters[id])
            for id in {*ids} - {0}:
                manager.activate_adapter(id)
            manager.set_adapter_mapping(LoRAMapping(ids, ids))
            outputs[ids] = run(len(ids))
            manager.remove_oldest_adapter()
    assert counter.programs == []
    for ids, got in outputs.items():
        rows = [adapters.get(id) for id in ids]
        expected = expected_rows(Toy(), rows, batches[len(ids)])
        np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=0)


def test_the_model_runs_as_the_base_after_the_warmup() -> None:
    manager = LRUCacheLoRAModelManager(Toy(), CONFIG)
    manager.warmup([2], lambda rows: manager.model(inputs(rows)))
    np.testing.assert_array_equal(manager.model(inputs(3)), Toy()(inputs(3)))


def test_a_failing_run_leaves_no_dummies() -> None:
    manager = LRUCacheLoRAModelManager(Toy(), CONFIG)
    with pytest.raises(ValueError, match="routing names 2 rows"):
        manager.warmup([2], lambda rows: manager.model(jnp.zeros((3, 16))))
    assert len(manager) == 0


def test_a_warmup_comes_before_the_first_adapter() -> None:
    manager = LRUCacheLoRAModelManager(Toy(), CONFIG)
    manager.add_adapter(make_adapter(1, 2))
    with pytest.raises(RuntimeError, match="empty manager, 1 adapters are registered"):
        manager.warmup([2], lambda rows: None)
