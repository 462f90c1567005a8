"""Each kind of change: read as it is, or refused by name."""

import numpy as np
import pytest

from adapter_files import PREFIX, UP, WIDTH, Q, V, config, normal, pair, pairs
from lora_jax.adapters import (
    DoRA,
    EmbeddingLowRank,
    ExpertsLowRank,
    FullModule,
    LoRABias,
    LowRank,
    ReplacedBias,
    TokenRows,
    adapter_from_tensors,
)
from lora_jax.errors import AdapterError

VOCAB = 100
EMBED, HEAD = "model.embed_tokens", "lm_head"
EXPERTS = "model.layers.0.mlp.experts"
RNG = np.random.default_rng(1)
ROW = normal(RNG, WIDTH)
TABLE = normal(RNG, VOCAB, WIDTH)


def read(extra, **fields):
    tensors = {f"{PREFIX}{name}": array for name, array in extra.items()}
    return adapter_from_tensors(pair(Q, 4) | tensors, config(**fields), name="a")


def refused(extra, **fields):
    with pytest.raises(AdapterError) as caught:
        read(extra, **fields)
    return str(caught.value)


def embedding(rank=4):
    return {
        f"{EMBED}.lora_embedding_A": normal(RNG, rank, VOCAB),
        f"{EMBED}.lora_embedding_B": normal(RNG, WIDTH, rank),
    }


def experts(module, rank=3, count=4):
    return {
        f"{module}.lora_A.weight": normal(RNG, count * rank, WIDTH),
        f"{module}.lora_B.weight": normal(RNG, 48, rank * count),
    }


def test_a_lora_bias_shares_the_scale():
    adapter = read({f"{Q}.lora_B.bias": ROW}, lora_bias=True)
    part = adapter.parts[Q]
    assert isinstance(part, LoRABias)
    assert (part.rank, part.update.scale) == (4, 2.0)
    np.testing.assert_array_equal(part.bias, ROW)
    assert adapter.kinds == {"lora_bias", "lora"}


@pytest.mark.parametrize("shape", [(WIDTH,), (1, WIDTH)])
@pytest.mark.parametrize("name", ["", ".default.weight", ".weight", ".default"])
def test_dora_has_a_magnitude(shape, name):
    key = f"{Q}.lora_magnitude_vector{name}"
    tensors = pair(Q, 4)
    if "default" in name:
        tensors = {n.replace(".w", ".default.w"): a for n, a in tensors.items()}
    tensors[f"{PREFIX}{key}"] = ROW.reshape(shape)
    part = adapter_from_tensors(tensors, config(use_dora=True), name="a").parts[Q]
    assert isinstance(part, DoRA)
    np.testing.assert_array_equal(part.magnitude, ROW)


def test_a_replaced_bias_goes_with_the_update_or_alone():
    tensors = {f"{Q}.base_layer.bias": ROW, f"{V}.bias": ROW}
    parts = read(tensors, bias="all").parts
    assert isinstance(parts[Q], ReplacedBias)
    assert isinstance(parts[Q].update, LowRank)
    assert isinstance(parts[V], ReplacedBias)
    assert parts[V].update is None
    assert parts[V].rank == 0
    del tensors[f"{V}.bias"]
    assert read(tensors, bias="lora_only").parts[Q].rank == 4


def test_kinds_nest():
    tensors = {f"{Q}.base_layer.bias": ROW, f"{Q}.lora_magnitude_vector": ROW}
    adapter = read(tensors, bias="lora_only", use_dora=True)
    assert adapter.kinds == {"bias", "dora", "lora"}
    assert adapter.report.modules[0].kind == "bias + dora + lora"
    assert adapter.report.modules[0].scale == 2.0
    assert adapter.report.matched == 4


def test_an_embedding_pair_and_its_base_copy():
    tensors = embedding() | {f"{EMBED}.base_layer.weight": TABLE}
    adapter = read(tensors)
    part = adapter.parts[EMBED]
    assert isinstance(part, EmbeddingLowRank)
    assert (part.a.shape, part.b.shape, part.scale) == ((4, VOCAB), (WIDTH, 4), 2.0)
    assert [item.reason for item in adapter.report.ignored] == [
        "copy of the base layer's weight"
    ]
    assert adapter.base_copies[EMBED].shape == (VOCAB, WIDTH)
    assert adapter.report.total == 5


def test_an_embedding_may_have_a_magnitude():
    tensors = embedding() | {f"{EMBED}.lora_magnitude_vector": ROW}
    part = read(tensors).parts[EMBED]
    assert isinstance(part, DoRA)
    assert isinstance(part.update, EmbeddingLowRank)


def test_a_head_pair_is_a_linear_one():
    tensors = {
        f"{HEAD}.lora_A.weight": normal(RNG, 4, WIDTH),
        f"{HEAD}.lora_B.weight": normal(RNG, VOCAB, 4),
        f"{HEAD}.base_layer.weight": TABLE,
    }
    assert isinstance(read(tensors).parts[HEAD], LowRank)


FULL = [
    ({"score.weight": ROW[None]}, {"modules_to_save": ["classifier", "score"]}),
    ({f"{EMBED}.weight": TABLE}, {"modules_to_save": ["embed_tokens"]}),
    # PEFT saves these unasked when the vocabulary was resized.
    ({f"{EMBED}.weight": TABLE, f"{HEAD}.weight": TABLE}, {}),
    ({"model.norm.weight": ROW}, {"modules_to_save": ["norm"]}),
    ({"classifier.dense.weight": TABLE}, {"modules_to_save": ["classifier"]}),
    ({"score.modules_to_save.weight": TABLE}, {"modules_to_save": ["score"]}),
    ({"score.modules_to_save.x.weight": TABLE}, {"modules_to_save": ["score"]}),
]


@pytest.mark.parametrize(("tensors", "fields"), FULL, ids=range(len(FULL)))
def test_a_whole_module_replaces_the_base(tensors, fields):
    adapter = read(tensors, **fields)
    full = [part for part in adapter.parts.values() if isinstance(part, FullModule)]
    assert len(full) == len(tensors)
    for part, array in zip(full, tensors.values(), strict=True):
        np.testing.assert_array_equal(part.weight, array)


def test_the_three_spellings_of_a_classifiers_bias_are_one():
    bias = normal(RNG, 3)
    tensors = {
        "classifier.weight": normal(RNG, 3, WIDTH),
        "classifier.bias": bias,
        "classifier.modules_to_save.bias": bias,
        "classifier.original_module.bias": bias + 1,
    }
    fields = {"modules_to_save": ["classifier", "score"], "bias": "all"}
    adapter = read(tensors, **fields)
    np.testing.assert_array_equal(adapter.parts["classifier"].bias, bias)
    assert (adapter.report.matched, len(adapter.report.ignored)) == (4, 2)
    tensors["classifier.modules_to_save.bias"] = bias + 1
    assert "should be equal, and differ" in refused(tensors, **fields)


TOKENS = f"{EMBED}.token_adapter.trainable_tokens_delta"
INDICES = [[7, 3, 98], {"embed_tokens": [7, 3, 98]}, {EMBED: [7, 3, 98], HEAD: [1]}]


@pytest.mark.parametrize("indices", INDICES, ids=str)
def test_token_rows_keep_the_order_of_their_indices(indices):
    part = read({TOKENS: TABLE[:3]}, trainable_token_indices=indices).parts[EMBED]
    assert isinstance(part, TokenRows)
    assert part.indices == (7, 3, 98)
    np.testing.assert_array_equal(part.rows, TABLE[:3])


def test_an_activated_adapter_waits_for_its_tokens():
    adapter = read({}, alora_invocation_tokens=[5, 6])
    assert adapter.invocation_tokens == (5, 6)
    assert adapter.kinds == {"lora", "alora"}
    assert adapter.content_hash != read({}).content_hash


def test_experts_keep_their_flat_factors_and_their_parameter():
    tensors = experts(f"{EXPERTS}.base_layer") | experts(EXPERTS)
    names = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    patterns = {"rank_pattern": {".*experts.*": 3}, "alpha_pattern": {"down_proj": 12}}
    parts = read(tensors, target_parameters=names, **patterns).parts
    outer, inner = parts[EXPERTS], parts[f"{EXPERTS}.base_layer"]
    assert isinstance(outer, ExpertsLowRank)
    assert isinstance(inner, ExpertsLowRank)
    assert (inner.parameter, inner.rank, inner.scale) == ("gate_up_proj", 3, 8 / 3)
    assert (outer.parameter, outer.rank, outer.scale) == ("down_proj", 3, 4.0)


PARAMETERS = [
    (["mlp.experts.gate_up_proj"], "gate_up_proj"),
    (["mlp.experts.down_proj"], "down_proj"),
    (["gate_up_proj"], "gate_up_proj"),
    (["mlp.experts.gate_up_proj", "mlp.gate.weight"], "gate_up_proj"),
    (None, ""),
]


@pytest.mark.parametrize(("names", "parameter"), PARAMETERS)
def test_only_the_config_tells_which_parameter_one_pair_is_for(names, parameter):
    adapter = read(experts(EXPERTS, rank=4), target_parameters=names)
    assert adapter.parts[EXPERTS].parameter == parameter
    absent = [note for note in adapter.report.notes if "mlp.gate" not in note]
    assert absent == []


DECLARED = [
    {"target_modules": ["q_proj", "nowhere"]},
    {"modules_to_save": ["nowhere"]},
    {"target_parameters": ["mlp.experts.nowhere"]},
]


@pytest.mark.parametrize("fields", DECLARED, ids=str)
def test_what_is_declared_and_absent_is_noted(fields):
    (note,) = read({}, **fields).report.notes
    assert "nowhere" in note


EMPTY = np.zeros((0, 3), np.float32)
REFUSED = [
    ({}, {"use_dora": True}, f"{Q}: the config says use_dora=True, the file has no"),
    ({}, {"lora_bias": True}, "lora_bias=True, the file has no tensor"),
    (
        {f"{Q}.lora_magnitude_vector": ROW},
        {"use_dora": False},
        "use_dora=False, the file has a tensor",
    ),
    ({f"{Q}.lora_magnitude_vector": ROW[:5]}, {}, r"shape \(5,\), expected \(32,\)"),
    ({f"{Q}.lora_B.bias": ROW[:5]}, {}, r"shape \(5,\), expected \(32,\)"),
    (
        {f"{Q}.lora_B.bias": ROW, f"{Q}.lora_magnitude_vector": ROW},
        {},
        "no meaning in PEFT",
    ),
    ({f"{Q}.base_layer.bias": ROW}, {}, "says bias='none'"),
    ({f"{Q}.base_layer.bias": ROW[:5]}, {"bias": "all"}, r"expected \(32,\)"),
    ({f"{V}.bias": ROW}, {"bias": "lora_only"}, "1 of 3 tensors are not known"),
    ({f"{V}.bias": TABLE}, {"bias": "all"}, r"shape \(100, 32\)"),
    ({f"{V}.bias": ROW, f"{V}.base_layer.bias": ROW}, {"bias": "all"}, "two biases"),
    ({f"{V}.weight": TABLE}, {}, "1 of 3 tensors are not known"),
    ({"score.weight": EMPTY}, {"modules_to_save": ["score"]}, r"shape \(0, 3\)"),
    (
        {"score.weight": TABLE, "score.bias": ROW},
        {"modules_to_save": ["score"]},
        r"expected \(100,\)",
    ),
    ({"score.bias": ROW}, {"modules_to_save": ["norm"]}, "not known"),
    ({TOKENS: TABLE[:3]}, {}, "trainable_token_indices does not name"),
    ({TOKENS: TABLE[:3]}, {"trainable_token_indices": [1, 2]}, "each of the 2"),
    ({TOKENS: TABLE[:3]}, {"trainable_token_indices": {HEAD: [1, 2, 3]}}, "not name"),
    ({TOKENS: TABLE[:2]}, {"trainable_token_indices": [1, 1]}, "distinct token ids"),
    ({TOKENS: TABLE[:1]}, {"trainable_token_indices": [-1]}, "distinct token ids"),
    ({}, {"alora_invocation_tokens": ["a"]}, "list of token ids"),
    ({}, {"bias": "some"}, "must be none, all or lora_only"),
    ({f"{EMBED}.lora_embedding_A": TABLE.T}, {}, "lora_embedding_B is missing"),
    (embedding(2), {}, "rank 2, the config declares 4"),
    (embedding(), {"use_dora": True}, f"{EMBED}: the config says use_dora=True"),
    (experts(EXPERTS, rank=3), {"r": 5}, "no multiple of the declared rank 5"),
    (experts(EXPERTS), {"r": None}, "experts' rank is unknown"),
    (experts(EXPERTS) | {f"{EXPERTS}.lora_B.bias": ROW}, {}, "expected"),
    ({f"{Q}.lora_embedding_A": ROW[None]}, {}, "no meaning together|is missing"),
]


@pytest.mark.parametrize(
    ("tensors", "fields", "text"), REFUSED, ids=range(len(REFUSED))
)
def test_a_contradiction_is_refused_by_name(tensors, fields, text):
    with pytest.raises(AdapterError, match=text):
        read(tensors, **fields)


def test_every_module_keeps_its_own_kind_in_one_adapter():
    tensors = embedding() | {f"{Q}.lora_B.bias": ROW, f"{V}.bias": ROW}
    tensors |= {name.removeprefix(PREFIX): array for name, array in pairs([UP]).items()}
    tensors[f"{UP}.lora_B.bias"] = normal(RNG, 64)
    parts = read(tensors, bias="all").parts
    kinds = {module: type(part) for module, part in parts.items()}
    assert kinds == {
        EMBED: EmbeddingLowRank,
        Q: LoRABias,
        UP: LoRABias,
        V: ReplacedBias,
    }
