"""Gradients of lora_experts: against float64, and each adapter's alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from delta_cases import expected_gradients
from expert_cases import DOWN, expert_arguments, expert_arrays, small
from lora_kernels import lora_experts

NAMES = ("x", "y", "a", "b", "scale", "weight")

CASES = [
    small(),
    small(name="down", **DOWN),
    small(name="top-1", chosen=1),
    small(name="top-8", chosen=8, experts=16, tokens=9),
    small(name="many-rows", tokens=90, slots=2, distribution="zipf", ranks=(8,)),
    small(name="all-base", distribution="all_base"),
    small(name="all-remote", remote=1.0),
    small(name="no-tokens", tokens=0),
]

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}
"""Largest error of a gradient relative to the largest gradient of its array."""


def cotangent_of(arrays):
    rng = np.random.default_rng(7)
    return rng.standard_normal(arrays.y.shape, dtype=np.float32)


def gradients(arrays, widths):
    positional, keywords = expert_arguments(arrays, widths)
    cotangent = jnp.asarray(cotangent_of(arrays))

    def loss(x, y, a, b, scale, weight):
        routing = dataclasses.replace(keywords["routing"], weight=weight)
        out = lora_experts(
            x, y, a, b, scale=scale, rank=keywords["rank"], routing=routing,
            part_widths=widths,
        )  # fmt: skip
        return jnp.sum(out.astype(jnp.float32) * cotangent)

    arguments = (*positional, keywords["scale"], keywords["routing"].weight)
    found = jax.jit(jax.grad(loss, range(6)))(*arguments)
    return dict(zip(NAMES, map(np.asarray, found), strict=True))


def wanted_gradients(arrays, widths):
    cotangent = cotangent_of(arrays).astype(arrays.y.dtype)
    flat = arrays.virtual._replace(y=cotangent)
    dx, da, db, dscale, dweight = expected_gradients(flat, widths)
    rows, d_in = arrays.x.shape
    return {
        "x": dx.reshape(rows, -1, d_in).sum(axis=1) if rows else dx,
        "y": cotangent.astype(np.float64),
        "a": da.reshape(arrays.a.shape),
        "b": db.reshape(arrays.b.shape),
        "scale": dscale.reshape(arrays.scale.shape),
        "weight": dweight,
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_equal_those_of_dense_experts_in_float64(case):
    assert_gradients(case)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_narrow_dtypes_equal_float64(dtype):
    assert_gradients(small(dtype=dtype))


def assert_gradients(case):
    arrays = expert_arrays(case)
    found = gradients(arrays, case.part_widths)
    wanted = wanted_gradients(arrays, case.part_widths)
    for name in NAMES:
        assert found[name].dtype == getattr(arrays, name).dtype, name
        assert found[name].shape == wanted[name].shape, name
        size = max(1.0, np.abs(wanted[name]).max(initial=0))
        error = np.abs(found[name].astype(np.float64) - wanted[name])
        assert error.max(initial=0) <= TOLERANCE[case.dtype] * size, name
        assert not found[name][wanted[name] == 0].any(), f"{name}: not exactly zero"


def test_a_mixed_batch_gives_each_adapter_its_gradient_alone():
    case = small(tokens=30, distribution="distinct")
    arrays = expert_arrays(case)
    mixed = gradients(arrays, case.part_widths)
    for slot in range(case.slots):
        own = np.where(arrays.slot == slot, slot, -1).astype(np.int32)
        alone = gradients(arrays._replace(slot=own), case.part_widths)
        for name in ("a", "b", "scale"):
            np.testing.assert_array_equal(mixed[name][slot], alone[name][slot])
            np.testing.assert_array_equal(np.delete(alone[name], slot, axis=0), 0)
        rows = arrays.slot == slot
        np.testing.assert_array_equal(mixed["x"][rows], alone["x"][rows])
        np.testing.assert_array_equal(alone["x"][~rows], 0)
        assert np.abs(alone["b"][slot]).max() > 0.1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_poison_of_one_expert_reaches_no_other_gradient(value):
    case = small(tokens=30, ranks=(8, 5, 0), max_rank=9)
    arrays = expert_arrays(case)
    clean = gradients(arrays, case.part_widths)
    a, b = arrays.a.copy(), arrays.b.copy()
    tail = np.arange(a.shape[3]) >= arrays.rank[..., None]
    a[tail], a[1, 2], b[1, 2] = value, value, value
    scale = np.where(arrays.rank > 0, arrays.scale, value).astype(np.float32)
    dirty = gradients(arrays._replace(a=a, b=b, scale=scale), case.part_widths)
    pairs = arrays.virtual.slot == case.experts + 2
    assert 0 < pairs.sum() < len(pairs)
    np.testing.assert_array_equal(dirty["weight"][~pairs], clean["weight"][~pairs])
    rows = ~pairs.reshape(case.tokens, case.chosen).any(axis=1)
    np.testing.assert_array_equal(dirty["x"][rows], clean["x"][rows])
    spared = np.ones(a.shape[:2], bool)
    spared[1, 2] = False
    for name in ("a", "b", "scale"):
        np.testing.assert_array_equal(dirty[name][spared], clean[name][spared])
