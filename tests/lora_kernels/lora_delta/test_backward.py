"""Gradients of lora_delta: against reference in float64, alone against mixed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from delta_cases import call_arguments, small
from lora_kernels import lora_delta
from lora_kernels.lora_delta import reference
from lora_kernels.lora_delta.specs import Spec, arrays_of

NAMES = ("x", "y", "a", "b", "scale", "weight")

CASES = [
    small(),
    small(tokens=1, distribution="identical"),
    small(tokens=70, distribution="zipf", ranks=(8,)),
    small(tokens=40, distribution="all_base"),
    small(slots=1, distribution="identical", part_widths=(33,), ranks=(5,)),
    Spec(name="wide", tokens=64, slots=3, d_in=200, part_widths=(64, 32), ranks=(64,)),
]

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
"""Largest error of a gradient relative to the largest gradient of its array."""


def loss(function, keywords, cotangent, *arguments):
    x, y, a, b, scale, weight = arguments
    routing = dataclasses.replace(keywords["routing"], weight=weight)
    out = function(
        x, y, a, b, scale=scale, rank=keywords["rank"], routing=routing,
        part_widths=keywords["part_widths"],
    )  # fmt: skip
    return jnp.sum(out.astype(cotangent.dtype) * cotangent)


def gradients(function, arrays, part_widths):
    positional, keywords = call_arguments(arrays, part_widths)
    arguments = (*positional, keywords["scale"], keywords["routing"].weight)
    rng = np.random.default_rng(7)
    cotangent = jnp.asarray(rng.standard_normal(arrays.y.shape, dtype=np.float32))
    call = jax.grad(functools.partial(loss, function, keywords, cotangent), range(6))
    return dict(zip(NAMES, map(np.asarray, jax.jit(call)(*arguments)), strict=True))


def float64_gradients(arrays, part_widths):
    with jax.enable_x64(True):
        wide = [
            field if field.dtype == np.int32 else field.astype(np.float64)
            for field in arrays
        ]
        return gradients(reference.lora_delta, type(arrays)(*wide), part_widths)


@pytest.mark.parametrize("spec", CASES, ids=lambda s: f"t{s.tokens}-{s.distribution}")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_equal_those_of_the_reference_in_float64(spec, dtype):
    spec = dataclasses.replace(spec, dtype=dtype)
    arrays = arrays_of(spec)
    found = gradients(lora_delta, arrays, spec.part_widths)
    wanted = float64_gradients(arrays, spec.part_widths)
    for name in NAMES:
        assert found[name].dtype == getattr(arrays, name).dtype
        size = max(1.0, np.abs(wanted[name]).max(initial=0))
        error = np.abs(found[name].astype(np.float64) - wanted[name])
        assert error.max(initial=0) <= TOLERANCE[dtype] * size, name


def test_a_mixed_batch_gives_each_adapter_its_gradient_alone():
    spec = small(tokens=40, distribution="distinct")
    arrays = arrays_of(spec)
    mixed = gradients(lora_delta, arrays, spec.part_widths)
    for slot in range(spec.slots):
        own = np.where(arrays.slot == slot, slot, -1).astype(np.int32)
        alone = gradients(lora_delta, arrays._replace(slot=own), spec.part_widths)
        rows = arrays.slot == slot
        for name in ("a", "b", "scale"):
            np.testing.assert_array_equal(mixed[name][slot], alone[name][slot])
            others = np.delete(alone[name], slot, axis=0)
            np.testing.assert_array_equal(others, 0)
        for name in ("x", "weight"):
            np.testing.assert_array_equal(mixed[name][rows], alone[name][rows])
            np.testing.assert_array_equal(alone[name][~rows], 0)
        assert np.abs(alone["b"][slot]).max() > 0.1


def test_rank_tails_and_idle_slots_have_exactly_no_gradient():
    spec = small(slots=6, max_rank=16)
    arrays = arrays_of(spec)
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(arrays.a.shape, dtype=np.float32)
    tail = np.arange(16) >= arrays.rank[:, :, None]
    arrays = arrays._replace(a=np.where(tail[..., None], noise, arrays.a))
    found = gradients(lora_delta, arrays, spec.part_widths)
    idle = np.setdiff1d(np.arange(6), arrays.slot)
    assert len(idle) > 0
    np.testing.assert_array_equal(found["a"][tail], 0)
    rank_of_column = np.repeat(arrays.rank, spec.part_widths, axis=1)
    b_tail = np.arange(16)[None, :, None] >= rank_of_column[:, None, :]
    np.testing.assert_array_equal(found["b"][b_tail], 0)
    for name in ("a", "b", "scale"):
        np.testing.assert_array_equal(found[name][idle], 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_poison_of_one_adapter_reaches_no_other_gradient(value):
    spec = small(tokens=40, distribution="half_base")
    arrays = arrays_of(spec)
    clean = gradients(lora_delta, arrays, spec.part_widths)
    a, b, x = arrays.a.copy(), arrays.b.copy(), arrays.x.copy()
    tail = np.arange(a.shape[2]) >= arrays.rank[:, :, None]
    a[tail], a[1], b[1] = value, value, value
    x[(arrays.slot == 1) | (arrays.slot == -1)] = value
    dirty = gradients(lora_delta, arrays._replace(a=a, b=b, x=x), spec.part_widths)
    rows = arrays.slot != 1
    for name in ("x", "weight"):
        np.testing.assert_array_equal(dirty[name][rows], clean[name][rows])
    spared = np.arange(spec.slots) != 1
    for name in ("a", "b", "scale"):
        np.testing.assert_array_equal(dirty[name][spared], clean[name][spared])


def test_remat_and_scan_give_the_same_gradients():
    spec = small()
    arrays = arrays_of(spec)
    plain = gradients(lora_delta, arrays, spec.part_widths)

    def remat(x, y, a, b, *, part_widths, **keywords):
        call = functools.partial(lora_delta, part_widths=part_widths)
        return jax.checkpoint(call)(x, y, a, b, **keywords)

    again = gradients(remat, arrays, spec.part_widths)
    for name in NAMES:
        np.testing.assert_array_equal(again[name], plain[name])


def test_adapters_train_together_under_vmap_of_the_batch():
    spec = small()
    arrays = arrays_of(spec)
    positional, keywords = call_arguments(arrays, spec.part_widths)
    x, y, a, b = positional
    xs, ys = jnp.stack([x, 2 * x, -x]), jnp.stack([y, y, y])

    def one(x, y):
        return lora_delta(x, y, a, b, **keywords)

    def total(a, x, y):
        return jnp.sum(lora_delta(x, y, a, b, **keywords) ** 2)

    together = jax.jit(jax.vmap(one))(xs, ys)
    grads = jax.vmap(jax.grad(total), in_axes=(None, 0, 0))(a, xs, ys)
    for k in range(3):
        np.testing.assert_allclose(together[k], one(xs[k], ys[k]), atol=2e-5)
        np.testing.assert_allclose(
            grads[k], jax.grad(total)(a, xs[k], ys[k]), rtol=1e-4, atol=1e-3
        )


def test_forward_mode_is_refused():
    spec = small()
    (x, y, a, b), keywords = call_arguments(arrays_of(spec), spec.part_widths)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: lora_delta(x, y, a, b, **keywords), (x,), (x,))
