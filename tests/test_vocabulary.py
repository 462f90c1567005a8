"""Vocabularies of any size, one for each row, under a soft cap of the logits."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax import LoRAConfig, LoRAMapping, LoRAModelManager
from lora_jax.adapters import (
    Adapter,
    AdapterPart,
    EmbeddingLowRank,
    FullModule,
    LowRank,
    Report,
)
from lora_jax.models import CausalLM, config_from_dict

CONFIG = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "query_pre_attn_scalar": 4,
    "final_logit_softcapping": 2.5,
}
VOCAB, WIDTH, CAP = 13, 8, 2.5
PROMPT = (1, 5, 2, 12)

GEMMA_1 = 300_000
"""Tokens; vLLM refuses an adapted head of more than 258048."""


def _model(**changes: object) -> CausalLM:
    config = config_from_dict({**CONFIG, **changes}, origin="tiny")
    return CausalLM(config, dtype="float32", rngs=nnx.Rngs(0))


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def _adapter(number: int, parts: dict[str, AdapterPart]) -> Adapter:
    return Adapter(
        name=f"a{number}",
        id=number,
        parts=parts,
        content_hash=str(number),
        report=Report((), (), 0),
    )


def _logits(model: CausalLM, adapters: list[Adapter], rows: list[int]) -> np.ndarray:
    manager = LoRAModelManager(model, LoRAConfig(max_loras=2, max_lora_rank=2))
    for adapter in adapters:
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)
    ids = [id_ for id_ in rows for _ in PROMPT]
    manager.set_adapter_mapping(LoRAMapping(ids, rows))
    return np.asarray(model(jnp.asarray([PROMPT] * len(rows))))


def test_the_soft_cap_bounds_the_head_with_its_update():
    pair = LowRank(_normal(1, 2, WIDTH), _normal(2, VOCAB, 2), 0.8)
    base, adapted = _logits(_model(), [_adapter(1, {"lm_head": pair})], [0, 1])
    plain = _model()
    hidden = np.asarray(plain.prefill(jnp.asarray([PROMPT]))[0][0], np.float64)
    table = np.asarray(plain.model.embed_tokens.embedding[...], np.float64)
    raw = hidden @ (table + pair.scale * pair.b @ pair.a).T
    assert np.abs(raw).max() > CAP
    np.testing.assert_allclose(adapted, CAP * np.tanh(raw / CAP), atol=1e-5)
    both = plain(jnp.asarray([PROMPT, PROMPT]))  # Another shape may round otherwise.
    np.testing.assert_array_equal(base, both[0])


def _grown(tables: dict[str, np.ndarray]) -> CausalLM:
    """The model as it would be with an adapter's own embedding and head."""
    size = len(tables["lm_head"])
    model = _model(vocab_size=size, tie_word_embeddings=False)
    tables_of = ("embed_tokens", "lm_head")
    body = nnx.to_flat_state(nnx.state(_model(), nnx.Param))
    body = [(p, value) for p, value in body if not set(tables_of) & {*p}]
    nnx.update(model, nnx.from_flat_state(body))
    model.model.embed_tokens.embedding.set_value(tables["model.embed_tokens"])
    model.lm_head.kernel.set_value(tables["lm_head"].T)
    return model


def test_the_soft_cap_makes_no_token_legal_that_a_row_does_not_have():
    names = ("model.embed_tokens", "lm_head")
    tables = {
        number: {
            name: _normal(10 * number + i, size, WIDTH) for i, name in enumerate(names)
        }
        for number, size in ((1, VOCAB + 1), (2, VOCAB + 3))
    }
    adapters = [
        _adapter(number, {name: FullModule(table) for name, table in own.items()})
        for number, own in tables.items()
    ]
    rows = _logits(_model(), adapters, [1, 0, 2])
    assert rows.shape[-1] == VOCAB + 3
    own = [_grown(tables[1]), _model(), _grown(tables[2])]
    for row, model in zip(rows, own, strict=True):
        expected = np.asarray(model(jnp.asarray([PROMPT]))[0])
        size = expected.shape[-1]
        np.testing.assert_allclose(row[:, :size], expected, atol=1e-5)
        assert np.all(np.isneginf(row[:, size:]))
        assert np.abs(row[:, :size]).max() < CAP


class Large(nnx.Module):
    """An embedding and an untied head over more tokens than other servers adapt."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed_tokens = nnx.Embed(GEMMA_1, 2, rngs=rngs)
        self.lm_head = nnx.Linear(2, GEMMA_1, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        return self.lm_head(self.embed_tokens(tokens))


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_a_vocabulary_has_no_largest_size(module):
    kind = {"embed_tokens": EmbeddingLowRank, "lm_head": LowRank}[module]
    sizes = {"embed_tokens": (GEMMA_1, 2), "lm_head": (2, GEMMA_1)}[module]
    parts = {
        number: kind(_normal(number, 1, sizes[0]), _normal(9, sizes[1], 1), 0.5)
        for number in (1, 2)
    }
    model = Large()
    manager = LoRAModelManager(model, LoRAConfig(max_loras=2, max_lora_rank=1))
    for number, part in parts.items():
        manager.add_adapter(_adapter(number, {module: part}))
        manager.activate_adapter(number)
    tokens = np.array([GEMMA_1 - 1, 0, GEMMA_1 - 1, GEMMA_1 - 2])
    ids = [2, 1, 0, 1]
    manager.set_adapter_mapping(LoRAMapping(ids, ids))
    got = np.asarray(model(jnp.asarray(tokens)))
    base = Large()
    for row, (token, number) in enumerate(zip(tokens, ids, strict=True)):
        tables = {
            "embed_tokens": np.array(base.embed_tokens.embedding[...]),
            "lm_head": np.array(base.lm_head.kernel[...]),
        }
        plain = tables["embed_tokens"][token] @ tables["lm_head"]
        if number:
            part = parts[number]
            tables[module] += part.scale * part.a.T @ part.b.T
        expected = tables["embed_tokens"][token] @ tables["lm_head"]
        assert number == 0 or np.abs(expected - plain).max() > 1e-2
        np.testing.assert_allclose(got[row], expected, atol=1e-4)
