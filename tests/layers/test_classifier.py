"""Classification heads: one for each adapter, other label counts, base rows, faults."""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers import make_adapter
from lora_jax.adapters import FullModule, LowRank, adapter_from_tensors
from lora_jax.bank import empty_bank, room_for, stage, write
from lora_jax.config import LoRAConfig
from lora_jax.errors import AdapterError
from lora_jax.forward import install
from lora_jax.layers import wrap
from lora_jax.packing import pack
from lora_jax.routing import routing_from_slots

FLOAT32 = np.dtype("float32")
DIM, LABELS, SLOTS = 6, 3, 4


def _normal(seed, *shape):
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


class Model(nnx.Module):
    """A backbone layer over tokens and a head over the last token of each prompt."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.fc = nnx.Linear(DIM, DIM, rngs=rngs)
        self.score = nnx.Linear(DIM, LABELS, rngs=rngs)

    def __call__(self, x):
        return self.score(nnx.tanh(self.fc(x))[:, -1])


HEADS = {
    0: {"score": FullModule(_normal(1, 2, DIM), _normal(2, 2))},
    1: {
        "score": FullModule(_normal(3, 5, DIM)),
        "fc": LowRank(_normal(4, 2, DIM), _normal(5, DIM, 2), 0.5),
    },
    2: {"score": LowRank(_normal(6, 2, DIM), _normal(7, LABELS, 2), 0.5)},
    3: {"fc": LowRank(_normal(8, 2, DIM), _normal(9, DIM, 2), 0.5)},
}
"""Slot -> parts: two full heads of other sizes, a low-rank head, a backbone alone."""


def _adapter(parts):
    adapter = make_adapter(1, 2)
    object.__setattr__(adapter, "parts", parts)
    return adapter


def _expected(slot, x):
    """One prompt's logits, from weights changed as the adapter says."""
    model, parts = Model(), HEADS.get(slot, {})
    fc = np.array(model.fc.kernel[...], np.float64)
    score, bias = np.array(model.score.kernel[...], np.float64), np.zeros(LABELS)
    if "fc" in parts:
        fc = fc + parts["fc"].scale * (parts["fc"].b @ parts["fc"].a).T
    head = parts.get("score")
    if isinstance(head, LowRank):
        score = score + head.scale * (head.b @ head.a).T
    if isinstance(head, FullModule):
        score = head.weight.T
        bias = np.zeros(score.shape[1]) if head.bias is None else head.bias
    return np.tanh(x[-1] @ fc) @ score + bias


def _served(slots_of_heads=HEADS):
    model = Model()
    config = LoRAConfig(max_lora_rank=4, max_lora_cls_labels=5)
    sites = wrap(model, config)
    bank = empty_bank(sites, SLOTS, FLOAT32)
    for slot, parts in slots_of_heads.items():
        packed = pack(_adapter(parts), sites, FLOAT32)
        bank = room_for(bank, sites, packed)
        bank = write(bank, slot, stage(bank, packed))
    return model, bank


def _routing(slots):
    tokens = jnp.repeat(jnp.asarray(slots), 2)
    return routing_from_slots(tokens, SLOTS, prompt_slots=jnp.asarray(slots))


def test_one_batch_with_every_head():
    slots = [0, 1, -1, 2, 3, 1, 0]
    x = _normal(20, len(slots), 2, DIM)
    model, bank = _served()
    install(model, bank, _routing(slots))
    got = np.asarray(model(jnp.asarray(x)))
    base = np.asarray(Model()(jnp.asarray(x)))
    assert got.shape == (len(slots), 5)
    for row, slot in enumerate(slots):
        expected = _expected(slot, x[row])
        np.testing.assert_allclose(got[row, : len(expected)], expected, atol=1e-5)
        assert np.all(np.isneginf(got[row, len(expected) :]))
        if slot < 0:
            np.testing.assert_array_equal(got[row, :LABELS], base[row])
        elif len(expected) == LABELS:
            assert np.abs(expected - base[row]).max() > 1e-3


def test_without_a_full_head_the_output_is_as_wide_as_the_bases():
    model, bank = _served({2: HEADS[2], 3: HEADS[3]})
    install(model, bank, _routing([2, -1]))
    assert model(jnp.asarray(_normal(0, 2, 2, DIM))).shape == (2, LABELS)


FAULTS = {
    "labels": (
        FullModule(_normal(0, 6, DIM)),
        r"expected \(1\.\.5, 6\), received \(6, 6\)",
    ),
    "width": (FullModule(_normal(0, 2, DIM + 1)), r"received \(2, 7\)"),
    "axes": (FullModule(_normal(0, 2)), r"received \(2,\)"),
    "bias": (
        FullModule(_normal(0, 2, DIM), _normal(0, 3)),
        r"bias shape: expected \(2,\), received \(3,\)",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_head_that_does_not_fit_is_refused(case):
    part, text = FAULTS[case]
    sites = wrap(Model(), LoRAConfig(max_lora_rank=4, max_lora_cls_labels=5))
    with pytest.raises(AdapterError, match=text):
        pack(_adapter({"score": part}), sites, FLOAT32)


def test_a_token_classifier_takes_lora_on_its_backbone_only():
    class Tagger(Model):
        lora_domains: ClassVar = {"score": "tokens"}

    sites = wrap(Tagger(), LoRAConfig(max_lora_rank=4))
    pack(_adapter(HEADS[3]), sites, FLOAT32)
    for slot in (0, 2):
        text = "token_classify only supports LoRA on the"
        with pytest.raises(AdapterError, match=text):
            pack(_adapter(HEADS[slot]), sites, FLOAT32)


def test_the_backbone_of_a_token_classifier_is_adapted_token_by_token():
    class Tagger(Model):
        lora_domains: ClassVar = {"score": "tokens"}

        def __call__(self, x):
            return self.score(nnx.tanh(self.fc(x)))

    model, x = Tagger(), _normal(0, 4, DIM)
    base = np.asarray(model(jnp.asarray(x)))
    sites = wrap(model, LoRAConfig(max_lora_rank=4))
    bank = empty_bank(sites, SLOTS, FLOAT32)
    bank = write(bank, 3, stage(bank, pack(_adapter(HEADS[3]), sites, FLOAT32)))
    install(model, bank, routing_from_slots(jnp.asarray([3, -1, -1, 3]), SLOTS))
    got = np.asarray(model(jnp.asarray(x)))
    assert got.shape == (4, LABELS)
    np.testing.assert_array_equal(got[[1, 2]], base[[1, 2]])
    for row in (0, 3):
        expected = _expected(3, x[row : row + 1])
        assert np.abs(expected - base[row]).max() > 1e-3
        np.testing.assert_allclose(got[row], expected, atol=1e-5)


def test_two_heads_in_one_adapter_are_refused():
    sites = wrap(Model(), LoRAConfig(max_lora_rank=4))
    head = FullModule(_normal(0, LABELS, DIM))
    with pytest.raises(AdapterError, match="classifier: not a module that this model"):
        pack(_adapter({"score": head, "classifier": head}), sites, FLOAT32)


def test_one_of_the_saved_heads_that_a_config_lists_is_enough():
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 2,
        "target_modules": [],
        "modules_to_save": ["classifier", "score"],
    }
    weight = {"base_model.model.score.weight": _normal(0, LABELS, DIM)}
    adapter = adapter_from_tensors(weight, config, name="head only")
    packed = pack(adapter, wrap(Model(), LoRAConfig()), FLOAT32)
    assert packed.placed == {"score": "score"}
