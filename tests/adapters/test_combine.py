"""Sums of adapters, and the best adapter of a smaller rank."""

import numpy as np
import pytest

from adapter_files import UP, Q, V, config, normal, pair
from lora_jax.adapters import Adapter, adapter_from_tensors, combine_adapters
from lora_jax.errors import AdapterError

EMBED = "model.embed_tokens"
RNG = np.random.default_rng(5)


def make(seed, modules, rank=4, **fields) -> Adapter:
    tensors = {}
    for index, module in enumerate(modules):
        tensors |= pair(module, rank, seed=10 * seed + index)
    fields = config(**{"r": rank, "lora_alpha": 6} | fields)
    return adapter_from_tensors(tensors, fields, name=f"a{seed}")


def delta(part):
    return part.scale * part.b.astype(np.float64) @ part.a.astype(np.float64)


def test_a_sum_is_exact_and_its_rank_the_sum_of_ranks():
    one, two = make(1, [Q, UP]), make(2, [Q, V], rank=3)
    both = combine_adapters([one, two], [0.5, -2.0], name="both", adapter_id=900)
    assert (both.name, both.id, both.rank) == ("both", 900, 7)
    expected = {
        Q: 0.5 * delta(one.parts[Q]) - 2.0 * delta(two.parts[Q]),
        UP: 0.5 * delta(one.parts[UP]),
        V: -2.0 * delta(two.parts[V]),
    }
    assert both.parts.keys() == expected.keys()
    for module, value in expected.items():
        np.testing.assert_allclose(delta(both.parts[module]), value, atol=1e-6)
    assert {m: p.rank for m, p in both.parts.items()} == {Q: 7, UP: 4, V: 3}


@pytest.mark.parametrize("rank", [1, 2, 5, 8])
def test_a_smaller_rank_is_the_nearest_there_is(rank):
    one = make(1, [Q, UP], rank=8)
    small = combine_adapters([one], [1.0], name="small", rank=rank)
    for module, part in one.parts.items():
        whole = delta(part)
        values = np.linalg.svd(whole, compute_uv=False)
        best = np.sqrt((values[rank:] ** 2).sum())
        error = np.linalg.norm(delta(small.parts[module]) - whole)
        assert small.parts[module].rank == rank
        assert error == pytest.approx(best, abs=1e-5)
    if rank < 8:
        assert small.report.notes[0].startswith(f"{UP}: rank {rank} keeps ")


def test_a_product_of_smaller_rank_than_asked_for_keeps_its_own():
    one = make(1, [Q], rank=2)
    twice = combine_adapters([one, one], [1.0, 1.0], name="twice", rank=3)
    assert twice.rank == 2
    np.testing.assert_allclose(
        delta(twice.parts[Q]), 2 * delta(one.parts[Q]), atol=1e-5
    )


def test_embeddings_are_summed_as_embeddings():
    def embedding(seed):
        rng = np.random.default_rng(seed)
        tensors = {
            f"{EMBED}.lora_embedding_A": normal(rng, 4, 100),
            f"{EMBED}.lora_embedding_B": normal(rng, 32, 4),
        }
        return adapter_from_tensors(tensors, config(), name="a")

    one, two = embedding(1), embedding(2)
    both = combine_adapters([one, two], [1.0, 1.0], name="both", rank=6)
    assert both.kinds == {"embedding"}
    assert both.parts[EMBED].a.shape == (6, 100)


def test_what_has_no_sum_is_refused_by_name():
    one = make(1, [Q])
    biased = adapter_from_tensors(
        pair(Q, 4) | {f"{Q}.lora_B.bias": normal(RNG, 32)}, config(), name="biased"
    )
    waiting = make(3, [Q], alora_invocation_tokens=[1])
    other = adapter_from_tensors(
        {
            f"{Q}.lora_A.weight": normal(RNG, 4, 9),
            f"{Q}.lora_B.weight": normal(RNG, 9, 4),
        },
        config(),
        name="other",
    )
    with pytest.raises(AdapterError) as caught:
        combine_adapters([one, biased, waiting, other], [1.0] * 4, name="x")
    message = str(caught.value)
    for text in ("a lora_bias has no sum", "waits for its", "differs in kind or shape"):
        assert text in message


@pytest.mark.parametrize(
    ("weights", "rank", "text"),
    [
        ([], None, "0 weights"),
        ([float("nan")], None, "finite"),
        ([1.0], 0, "at least 1"),
    ],
)
def test_arguments_are_checked(weights, rank, text):
    with pytest.raises(AdapterError, match=text):
        combine_adapters([make(1, [Q])], weights, name="x", rank=rank)
