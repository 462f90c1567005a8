"""LoRA on the language-model head, tied and untied, on sampled rows and on all."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax.adapters import adapter_from_tensors
from lora_jax.bank import empty_bank, room_for, stage, write
from lora_jax.config import LoRAConfig
from lora_jax.forward import install
from lora_jax.layers import wrap
from lora_jax.models.head import TiedHead
from lora_jax.packing import pack
from lora_jax.routing import routing_from_slots

FLOAT32 = np.dtype("float32")
WIDTH, VOCAB = 6, 9


class Model(nnx.Module):
    """Embedding and head alone; `tied` shares their weights."""

    def __init__(self, *, tied):
        rngs = nnx.Rngs(3)
        self.embed_tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.tied = tied
        self.lm_head = (
            TiedHead(WIDTH, VOCAB) if tied else nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        )

    def logits(self, hidden):
        if self.tied:
            return self.lm_head(hidden, self.embed_tokens.embedding[...])
        return self.lm_head(hidden)

    def head_weights(self):
        if self.tied:
            return np.asarray(self.embed_tokens.embedding[...]).T
        return np.asarray(self.lm_head.kernel[...])


def _adapters():
    rng = np.random.default_rng(1)
    return [
        adapter_from_tensors(
            {
                "lm_head.lora_A.weight": rng.normal(size=(2, WIDTH)).astype("f4"),
                "lm_head.lora_B.weight": rng.normal(size=(VOCAB, 2)).astype("f4"),
            },
            {
                "peft_type": "LORA",
                "r": 2,
                "lora_alpha": 3,
                "target_modules": ["lm_head"],
            },
            name=name,
        )
        for name in "ab"
    ]


def _served(*, tied, target_modules=("lm_head",)):
    model = Model(tied=tied)
    sites = wrap(model, LoRAConfig(max_lora_rank=4, target_modules=target_modules))
    adapters = _adapters()
    bank = empty_bank(sites, 2, FLOAT32)
    for slot, adapter in enumerate(adapters):
        packed = pack(adapter, sites, FLOAT32)
        bank = room_for(bank, sites, packed)
        bank = write(bank, slot, stage(bank, packed))
    return model, bank, adapters


def _expected(adapters, hidden, slots, *, tied):
    weights = Model(tied=tied).head_weights()
    rows = []
    for row, slot in enumerate(slots):
        merged = weights
        if slot >= 0:
            pair = adapters[slot].parts["lm_head"]
            merged = weights + pair.scale * (pair.b @ pair.a).T
        rows.append(hidden[row] @ merged)
    return np.stack(rows)


@pytest.mark.parametrize("tied", [True, False])
def test_sampled_rows_use_the_prompts_routing_and_scored_tokens_the_tokens(tied):
    model, bank, adapters = _served(tied=tied)
    token_slots, prompt_slots = [0, 0, 0, -1, 1, 1], [0, -1, 1]
    routing = routing_from_slots(
        jnp.asarray(token_slots), 2, prompt_slots=jnp.asarray(prompt_slots)
    )
    install(model, bank, routing)
    hidden = np.random.default_rng(0).normal(size=(6, WIDTH)).astype("f4")
    for slots in (token_slots, prompt_slots):
        rows = hidden[: len(slots)]
        expected = _expected(adapters, rows, slots, tied=tied)
        base = rows @ Model(tied=tied).head_weights()
        changed = np.abs(expected - base).max(axis=-1) > 1e-3
        assert changed.tolist() == [slot >= 0 for slot in slots]
        np.testing.assert_allclose(model.logits(jnp.asarray(rows)), expected, atol=1e-5)


def test_a_tied_head_leaves_the_embedding_at_base():
    model, bank, _ = _served(tied=True)
    install(model, bank, routing_from_slots(jnp.asarray([0, 1]), 2))
    np.testing.assert_array_equal(
        model.embed_tokens(jnp.asarray([1, 2])),
        Model(tied=True).embed_tokens(jnp.asarray([1, 2])),
    )


def test_rows_that_no_routing_was_made_for_are_refused():
    model, bank, _ = _served(tied=True)
    install(model, bank, routing_from_slots(jnp.asarray([0, 1]), 2))
    with pytest.raises(ValueError, match="lm_head: the routing names 2 rows, but the"):
        model.logits(jnp.ones((5, WIDTH)))


def test_without_routing_the_head_is_the_base_head_bit_for_bit():
    model, bank, _ = _served(tied=True)
    install(model, bank, {})
    hidden = jnp.ones((3, WIDTH))
    np.testing.assert_array_equal(model.logits(hidden), Model(tied=True).logits(hidden))
