"""Flat and stacked expert factors -> those of each expert, in the right orientation."""

import itertools

import numpy as np
import pytest

from lora_jax.adapters import ExpertPairs, ExpertsLowRank, LowRank
from lora_jax.adapters.expert_layout import (
    ExpertShape,
    expert_factors,
    expert_paths,
    is_swapped,
    layout_faults,
    with_orientations,
)

COUNT, RANK, D, WIDTH = 4, 3, 10, 7
"""Rank and number of experts differ, so that taking one axis for the other shows."""


def flat(d_in, d_out, *, parameter="", version="", swapped=False):
    """What PEFT saves for random factors of each expert, and the factors."""
    rng = np.random.default_rng(3)
    a = rng.standard_normal((COUNT, RANK, d_in)).astype(np.float32)
    b = rng.standard_normal((COUNT, d_out, RANK)).astype(np.float32)
    first, second = (b.swapaxes(1, 2), a.swapaxes(1, 2)) if swapped else (a, b)
    lora_a = np.concatenate(list(first))
    lora_b = np.stack(list(second), axis=-1).reshape(second.shape[1], -1)
    part = ExpertsLowRank(lora_a, lora_b, 1.0, RANK, parameter, version)
    return part, a, b


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize(("d_in", "d_out"), [(D, 2 * WIDTH), (WIDTH, D)])
def test_shapes_tell_the_orientation(d_in, d_out, swapped, in_out):
    part, a, b = flat(d_in, d_out, swapped=swapped)
    shape = ExpertShape(COUNT, d_in, d_out, in_out)
    assert layout_faults(part, shape) == []
    assert is_swapped(part, shape) is swapped
    found = expert_factors(part, shape)
    for mine, theirs in zip(found, (a, b), strict=True):
        np.testing.assert_array_equal(mine, theirs)


SQUARE = [
    ("0.17.0", False, True),
    ("0.18.1", False, True),
    ("0.19.0", False, False),
    ("0.21.2", False, False),
    ("1.0.0.dev0", False, False),
    ("", False, None),
    ("unknown", False, None),
    ("0.18.1", True, False),
    ("0.19.0", True, None),
    ("", True, None),
]


@pytest.mark.parametrize(("version", "in_out", "swapped"), SQUARE)
def test_square_experts_go_by_the_version_or_are_refused(version, in_out, swapped):
    part, a, b = flat(D, D, version=version, swapped=bool(swapped))
    shape = ExpertShape(COUNT, D, D, in_out)
    assert is_swapped(part, shape) is swapped
    found = layout_faults(part, shape)
    if swapped is None:
        assert len(found) == 1
        assert "peft_version" in found[0]
        assert ("save gate_up_proj and down_proj" in found[0]) is in_out
    else:
        assert found == []
        np.testing.assert_array_equal(expert_factors(part, shape)[0], a)
        np.testing.assert_array_equal(expert_factors(part, shape)[1], b)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize(("d", "width"), [(D, D), (2 * WIDTH, WIDTH)])
def test_the_sibling_tells_the_orientation_of_square_experts(d, width, in_out, swapped):
    up, *_ = flat(d, 2 * width, parameter="gate_up_proj", swapped=swapped)
    down, *_ = flat(width, d, parameter="down_proj", swapped=swapped)
    told = with_orientations({"x.experts.base_layer": up, "x.experts": down})
    for part, d_in, d_out in zip(
        told.values(), (d, width), (2 * width, d), strict=True
    ):
        assert is_swapped(part, ExpertShape(COUNT, d_in, d_out, in_out)) is swapped


def test_siblings_of_other_layers_tell_nothing():
    up, *_ = flat(D, 2 * D, parameter="gate_up_proj")
    down, *_ = flat(D, D, parameter="down_proj")
    told = with_orientations({"x.experts": up, "y.experts": down})
    assert [part.swapped for part in told.values()] == [None, None]


def test_no_widths_make_both_orientations_of_a_pair_fit():
    for d, width in itertools.product(range(1, 9), repeat=2):
        up, *_ = flat(d, 2 * width, parameter="gate_up_proj")
        down, *_ = flat(width, d, parameter="down_proj")
        told = with_orientations({"e.experts.base_layer": up, "e.experts": down})
        assert [part.swapped for part in told.values()] == [False, False]


@pytest.mark.parametrize("shared", ["none", "a", "b"])
def test_shared_factors_are_every_expert_s(shared):
    a = np.ones((1 if shared == "a" else COUNT, RANK, D), np.float32)
    b = np.ones((1 if shared == "b" else COUNT, WIDTH, RANK), np.float32)
    shape = ExpertShape(COUNT, D, WIDTH, False)
    assert layout_faults(ExpertPairs(a, b, 1.0), shape) == []
    found = expert_factors(ExpertPairs(a, b, 1.0), shape)
    assert [f.shape for f in found] == [(COUNT, RANK, D), (COUNT, WIDTH, RANK)]


def test_paths_follow_the_parameter():
    part, *_ = flat(D, WIDTH, parameter="up_proj")
    assert expert_paths("m.experts", part) == ("m.experts.up_proj",)
    assert expert_paths("m.experts.base_layer", part) == ("m.experts.up_proj",)
    part, *_ = flat(D, WIDTH)
    unnamed = expert_paths("m.experts", part)
    assert unnamed == tuple(
        f"m.experts.{name}" for name in ("gate_up_proj", "up_proj", "down_proj")
    )
    pair = LowRank(part.a, part.b, 1.0)
    assert expert_paths("m.experts.3.w1", pair) == ("m.experts.3.w1",)


FAULTS = [
    (ExpertShape(COUNT + 1, D, WIDTH, False), "12 rows, the layer's 5 experts"),
    (ExpertShape(COUNT, D + 1, WIDTH, False), "have widths (10, 7)"),
]


@pytest.mark.parametrize(("shape", "text"), FAULTS)
def test_flat_factors_of_another_model_are_refused(shape, text):
    part, *_ = flat(D, WIDTH)
    assert text in layout_faults(part, shape)[0]


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ((COUNT - 1, RANK, D), (1, WIDTH, RANK), "lora_A has shape (3, 3, 10)"),
        ((1, RANK, D), (1, WIDTH + 1, RANK), "lora_B has shape (1, 8, 3)"),
    ],
)
def test_stacked_factors_of_another_model_are_refused(a, b, text):
    part = ExpertPairs(np.ones(a, np.float32), np.ones(b, np.float32), 1.0)
    (found,) = layout_faults(part, ExpertShape(COUNT, D, WIDTH, False))
    assert text in found
