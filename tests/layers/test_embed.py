"""Embeddings and heads: updated, replaced by row or as a whole, in one batch."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers import make_adapter
from lora_jax.adapters import (
    DoRA,
    EmbeddingLowRank,
    FullModule,
    LowRank,
    ReplacedBias,
    TokenRows,
)
from lora_jax.adapters.copies import copy_base
from lora_jax.bank import empty_bank, room_for, stage, write
from lora_jax.config import LoRAConfig
from lora_jax.errors import AdapterError
from lora_jax.forward import install
from lora_jax.layers import wrap
from lora_jax.models.head import TiedHead
from lora_jax.packing import pack
from lora_jax.routing import routing_from_slots

FLOAT32 = np.dtype("float32")
VOCAB, DIM = 11, 6
TOKENS = np.array([3, 7, 0, 10, 7, 3, 0, 5, 7, 3, 10, 0])
SLOTS = 6


def _normal(seed, *shape):
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


class Model(nnx.Module):
    """Embedding and head; logits of each token's own embedding."""

    def __init__(self, *, tied):
        rngs = nnx.Rngs(3)
        self.embed_tokens = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.tied = tied
        self.lm_head = (
            TiedHead(DIM, VOCAB)
            if tied
            else nnx.Linear(DIM, VOCAB, use_bias=False, rngs=rngs)
        )

    def __call__(self, tokens):
        hidden = self.embed_tokens(tokens)
        if self.tied:
            return hidden, self.lm_head(hidden, self.embed_tokens.embedding[...])
        return hidden, self.lm_head(hidden)


PARTS = {
    0: {
        "embed_tokens": EmbeddingLowRank(_normal(1, 2, VOCAB), _normal(2, DIM, 2), 0.5)
    },
    1: {"embed_tokens": TokenRows((7, 3, 10), _normal(3, 3, DIM))},
    2: {"embed_tokens": FullModule(_normal(4, VOCAB, DIM))},
    3: {"lm_head": FullModule(_normal(5, VOCAB, DIM))},
    4: {
        "lm_head": LowRank(_normal(6, 3, DIM), _normal(7, VOCAB, 3), 0.7),
        "embed_tokens": DoRA(
            EmbeddingLowRank(_normal(8, 2, VOCAB), _normal(9, DIM, 2), 0.5),
            1 + np.abs(_normal(10, DIM)),
        ),
    },
    5: {"lm_head": TokenRows((0, 5), _normal(11, 2, DIM))},
}
"""Slot -> parts; every kind that an embedding or a head can have."""


def _adapter(slot):
    adapter = make_adapter(slot + 1, 2)
    object.__setattr__(adapter, "parts", PARTS[slot])
    return adapter


def _tables(slot, *, tied):
    """The (vocab, dim) tables that slot's adapter makes of the embedding and head."""
    model = Model(tied=tied)
    embedding = np.array(model.embed_tokens.embedding[...], np.float64)
    head = embedding if tied else np.array(model.lm_head.kernel[...], np.float64).T
    tables = {"embed_tokens": embedding.copy(), "lm_head": head.copy()}
    for module, part in PARTS.get(slot, {}).items():
        table = tables[module]
        if isinstance(part, FullModule):
            tables[module] = part.weight
        elif isinstance(part, TokenRows):
            table[list(part.indices)] = part.rows
            if tied and module == "embed_tokens":
                tables["lm_head"][list(part.indices)] = part.rows
        elif isinstance(part, LowRank):
            tables[module] = table + part.scale * (part.b @ part.a)
        else:
            pair = part.update if isinstance(part, DoRA) else part
            table = table + pair.scale * (pair.b @ pair.a).T
            if isinstance(part, DoRA):
                table = table * part.magnitude / np.linalg.norm(table, axis=0)
            tables[module] = table
    return tables["embed_tokens"], tables["lm_head"]


def _served(*, tied):
    model = Model(tied=tied)
    sites = wrap(model, LoRAConfig(max_lora_rank=4))
    bank = empty_bank(sites, SLOTS, FLOAT32)
    assert {name: set(arrays) for name, arrays in bank.arrays.items()} == {
        "embed_tokens": {"rank"},
        "lm_head": {"rank"},
    }
    for slot in PARTS:
        packed = pack(_adapter(slot), sites, FLOAT32)
        bank = room_for(bank, sites, packed)
        bank = write(bank, slot, stage(bank, packed))
    return model, sites, bank


@pytest.mark.parametrize("tied", [True, False])
def test_every_kind_in_one_batch_equals_its_own_tables(tied):
    slots = np.array([0, 1, 2, 3, 4, 5, -1, 5, 1, -1, 1, 4])
    model, _, bank = _served(tied=tied)
    install(model, bank, routing_from_slots(jnp.asarray(slots), SLOTS))
    hidden, logits = (np.asarray(part) for part in model(jnp.asarray(TOKENS)))
    base_hidden, base_logits = Model(tied=tied)(jnp.asarray(TOKENS))
    for row, (slot, token) in enumerate(zip(slots, TOKENS, strict=True)):
        embedding, head = _tables(slot, tied=tied)
        np.testing.assert_allclose(hidden[row], embedding[token], atol=1e-5)
        np.testing.assert_allclose(logits[row], head @ embedding[token], atol=5e-5)
        if slot < 0:
            np.testing.assert_array_equal(hidden[row], base_hidden[row])
            np.testing.assert_array_equal(logits[row], base_logits[row])
        else:
            assert np.abs(logits[row] - base_logits[row]).max() > 1e-2


def test_a_reused_slot_keeps_no_rows_and_no_table():
    model, sites, bank = _served(tied=True)
    only = make_adapter(1, 1)
    parts = {"lm_head": LowRank(_normal(6, 1, DIM), _normal(7, VOCAB, 1), 0.0)}
    object.__setattr__(only, "parts", parts)
    for slot in PARTS:
        bank = write(bank, slot, stage(bank, pack(only, sites, FLOAT32)))
    install(model, bank, routing_from_slots(jnp.arange(6, dtype=jnp.int32), SLOTS))
    got, expected = model(jnp.asarray(TOKENS[:6])), Model(tied=True)(TOKENS[:6])
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_allclose(got[1], expected[1], atol=1e-6)


FAULTS = {
    "table": (FullModule(_normal(0, VOCAB - 1, DIM)), "a vocabulary may only have g"),
    "rows": (TokenRows((1,), _normal(0, 1, DIM + 1)), "the trained rows are 7 wide"),
    "ids": (TokenRows((1, VOCAB), _normal(0, 2, DIM)), r"token ids \[11\] are outside"),
    "vocabulary": (
        EmbeddingLowRank(_normal(1, 2, VOCAB - 1), _normal(2, DIM, 2), 1.0),
        r"vocabulary \(10\) must be the base model's \(11\)",
    ),
    "width": (
        EmbeddingLowRank(_normal(1, 2, VOCAB), _normal(2, DIM + 2, 2), 1.0),
        "lora_embedding_B has width 8, the layer 6",
    ),
    "rank": (
        EmbeddingLowRank(_normal(1, 5, VOCAB), _normal(2, DIM, 5), 1.0),
        "rank 5 exceeds max_lora_rank=4",
    ),
    "kind": (ReplacedBias(None, _normal(0, DIM)), "cannot be served by an embedding"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_does_not_fit_an_embedding_is_refused(case):
    part, text = FAULTS[case]
    adapter = make_adapter(1, 2)
    object.__setattr__(adapter, "parts", {"embed_tokens": part})
    sites = wrap(Model(tied=True), LoRAConfig(max_lora_rank=4))
    with pytest.raises(AdapterError, match=text):
        pack(adapter, sites, FLOAT32)


@pytest.mark.parametrize("tied", [True, False])
def test_larger_vocabularies_widen_the_logits_and_end_where_each_row_ends(tied):
    sizes = {0: VOCAB + 4, 1: VOCAB + 2, 2: VOCAB}
    tables = {
        slot: {
            "embed_tokens": _normal(slot, n, DIM),
            "lm_head": _normal(9 + slot, n, DIM),
        }
        for slot, n in sizes.items()
    }
    model = Model(tied=tied)
    sites = wrap(model, LoRAConfig(max_lora_rank=4))
    bank = empty_bank(sites, SLOTS, FLOAT32)
    for slot, arrays in tables.items():
        adapter = make_adapter(slot + 1, 2)
        parts = {name: FullModule(table) for name, table in arrays.items()}
        object.__setattr__(adapter, "parts", parts)
        packed = pack(adapter, sites, FLOAT32)
        bank = room_for(bank, sites, packed)
        bank = write(bank, slot, stage(bank, packed))
    slots, tokens = [0, 1, 2, -1, 0], [VOCAB + 3, VOCAB + 1, 4, 4, 4]
    install(model, bank, routing_from_slots(jnp.asarray(slots), SLOTS))
    _, logits = model(jnp.asarray(tokens))
    assert logits.shape == (5, VOCAB + 4)
    base = Model(tied=tied)(jnp.asarray([4]))[1][0]
    for row, (slot, token) in enumerate(zip(slots, tokens, strict=True)):
        expected = base
        if slot >= 0:
            expected = tables[slot]["lm_head"] @ tables[slot]["embed_tokens"][token]
        own = len(expected)
        np.testing.assert_allclose(logits[row, :own], expected, atol=1e-5)
        assert np.all(np.isneginf(np.asarray(logits)[row, own:]))


def test_a_head_that_draws_tokens_without_embeddings_is_refused():
    sites = wrap(Model(tied=False), LoRAConfig(max_lora_rank=4))
    adapter = make_adapter(1, 2)
    parts = {"lm_head": FullModule(_normal(0, VOCAB + 1, DIM))}
    object.__setattr__(adapter, "parts", parts)
    with pytest.raises(AdapterError, match="head has 12 tokens, the embedding 11"):
        pack(adapter, sites, FLOAT32)


def test_a_saved_head_with_a_bias_is_refused():
    layer = wrap(Model(tied=True), LoRAConfig())["lm_head"]
    part = FullModule(_normal(0, VOCAB, DIM), _normal(1, VOCAB))
    assert layer.faults(0, part) == ["a saved head with a bias cannot be served."]


def test_trained_tokens_of_a_tied_embedding_need_the_head():
    sites = wrap(Model(tied=True), LoRAConfig(target_modules=["embed_tokens"]))
    with pytest.raises(AdapterError, match="target_modules leaves it out; add it"):
        pack(_adapter(1), sites, FLOAT32)


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_with_a_copy_of_another_base_is_refused(module, tied):
    model = Model(tied=tied)
    sites = wrap(model, LoRAConfig(max_lora_rank=4))
    table = np.asarray(
        model.embed_tokens.embedding[...]
        if tied or module == "embed_tokens"
        else model.lm_head.kernel[...].T
    )
    slot = 0 if module == "embed_tokens" else 4
    adapter = _adapter(slot)
    object.__setattr__(adapter, "base_copies", {module: copy_base(table)})
    pack(adapter, sites, FLOAT32)
    object.__setattr__(adapter, "base_copies", {module: copy_base(table + 0.1)})
    with pytest.raises(AdapterError, match=f"{module}: .* trained on another base"):
        pack(adapter, sites, FLOAT32)


def test_embeddings_of_positions_are_left_alone():
    class WithPositions(nnx.Module):
        def __init__(self):
            self.wte = nnx.Embed(VOCAB, DIM, rngs=nnx.Rngs(0))
            self.wpe = nnx.Embed(5, DIM, rngs=nnx.Rngs(0))

    assert set(wrap(WithPositions(), LoRAConfig())) == {"wte"}
