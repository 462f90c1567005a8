"""Fused expert tensors of every layout: read as they are, or refused by name."""

import numpy as np
import pytest

from adapter_files import PREFIX, Q, config, normal, pair
from lora_jax.adapters import (
    ExpertPairs,
    ExpertsLowRank,
    LowRank,
    adapter_from_tensors,
    load_adapter,
    save_adapter,
)
from lora_jax.errors import AdapterError

EXPERTS = "model.layers.0.mlp.experts"
COUNT, RANK, D_IN, D_OUT = 4, 3, 10, 14


def read(module, a_shape, b_shape, **fields):
    rng = np.random.default_rng(2)
    tensors = {
        f"{PREFIX}{module}.lora_A.weight": normal(rng, *a_shape),
        f"{PREFIX}{module}.lora_B.weight": normal(rng, *b_shape),
    }
    fields = {"r": RANK, "rank_pattern": {"q_proj": 4}, **fields}
    return adapter_from_tensors(pair(Q, 4) | tensors, config(**fields), name="a")


SHAPES = {
    "one pair for each": ((COUNT, RANK, D_IN), (COUNT, D_OUT, RANK)),
    "A is shared": ((1, RANK, D_IN), (COUNT, D_OUT, RANK)),
    "B is shared": ((COUNT, RANK, D_IN), (1, D_OUT, RANK)),
}


@pytest.mark.parametrize("name", ["w1", "w2", "w3", "gate_up_proj", "down_proj"])
@pytest.mark.parametrize("case", SHAPES)
def test_three_axes_are_pairs_of_all_experts(tmp_path, case, name):
    adapter = read(f"{EXPERTS}.{name}", *SHAPES[case])
    part = adapter.parts[f"{EXPERTS}.{name}"]
    assert isinstance(part, ExpertPairs)
    assert (part.a.shape, part.b.shape) == SHAPES[case]
    assert (part.rank, part.scale) == (RANK, 8 / RANK)
    again = load_adapter(save_adapter(adapter, tmp_path / "out"))
    assert again.content_hash == adapter.content_hash


def test_two_axes_are_flat_factors_of_the_named_parameter(tmp_path):
    module = f"{EXPERTS}.down_proj"
    adapter = read(module, (COUNT * RANK, D_IN), (D_OUT, COUNT * RANK))
    part = adapter.parts[module]
    assert isinstance(part, ExpertsLowRank)
    assert (part.parameter, part.rank) == ("down_proj", RANK)
    again = load_adapter(save_adapter(adapter, tmp_path / "out"))
    assert again.content_hash == adapter.content_hash


def test_one_expert_is_an_ordinary_pair_with_its_own_alpha():
    alphas = {r"experts\.2\.w1": 12}
    for number, scale in ((1, 8 / RANK), (2, 12 / RANK)):
        module = f"{EXPERTS}.{number}.w1"
        shapes = (RANK, D_IN), (D_OUT, RANK)
        part = read(module, *shapes, alpha_pattern=alphas).parts[module]
        assert isinstance(part, LowRank)
        assert part.scale == scale


FAULTS = [
    (((4, 3), (4, 14, 3)), r"shape \(4, 3\), expected \(experts or 1, rank, width\)"),
    (((0, 3, 10), (4, 14, 3)), "none of them empty"),
    (((2, 3, 10), (4, 14, 3)), "are of 2 and 4 experts"),
    (((4, 3, 10), (4, 14, 2)), r"rank 3 of lora_A .* is not the rank 2"),
    (((4, 5, 10), (4, 14, 5)), "have rank 5, the config declares 3"),
]


@pytest.mark.parametrize(("shapes", "text"), FAULTS)
def test_factors_that_are_no_pairs_are_refused(shapes, text):
    with pytest.raises(AdapterError, match=text):
        read(f"{EXPERTS}.w1", *shapes)


def test_a_saved_adapter_names_only_the_parameters_that_it_knows(tmp_path):
    adapter = read(EXPERTS, (COUNT * RANK, D_IN), (D_OUT, COUNT * RANK))
    again = load_adapter(save_adapter(adapter, tmp_path / "out"))
    assert again.content_hash == adapter.content_hash
    assert again.config["target_parameters"] is None


@pytest.mark.parametrize("field", ["use_dora", "lora_bias"])
@pytest.mark.parametrize("module", [EXPERTS, f"{EXPERTS}.w1"])
def test_kinds_that_experts_cannot_have_are_refused(field, module):
    stacked = module.endswith("w1")
    shapes = SHAPES["one pair for each"] if stacked else ((12, D_IN), (D_OUT, 12))
    with pytest.raises(AdapterError, match=f"{field}=True, experts cannot have it"):
        read(module, *shapes, **{field: True})
