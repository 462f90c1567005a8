"""Gradients of lora_delta: against reference in float64, alone against mixed."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from delta_cases import call_arguments, expected_gradients, small
from lora_kernels import lora_delta
from lora_kernels.lora_delta import backward, reference
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

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}
"""Largest error of a gradient relative to the largest gradient of its array."""

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "reference"])


@functools.lru_cache(maxsize=4)
def compiled(function, part_widths):
    """The gradients as one program: all that changes with a batch is an argument."""

    def loss(arguments, rank, routing, cotangent):
        x, y, a, b, scale, weight = arguments
        routing = dataclasses.replace(routing, weight=weight)
        out = function(
            x, y, a, b, scale=scale, rank=rank, routing=routing, part_widths=part_widths
        )
        return jnp.sum(out.astype(cotangent.dtype) * cotangent)

    return jax.jit(jax.grad(loss))


def gradients(function, arrays, part_widths):
    positional, keywords = call_arguments(arrays, part_widths)
    routing = keywords["routing"]
    arguments = (*positional, keywords["scale"], routing.weight)
    rng = np.random.default_rng(7)
    cotangent = jnp.asarray(rng.standard_normal(arrays.y.shape, dtype=np.float32))
    call = compiled(function, part_widths)
    found = call(arguments, keywords["rank"], routing, cotangent)
    return dict(zip(NAMES, map(np.asarray, found), strict=True))


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


@IMPLEMENTATIONS
def test_a_mixed_batch_gives_each_adapter_its_gradient_alone(implementation):
    call = functools.partial(lora_delta, implementation=implementation)
    spec = small(tokens=40, distribution="distinct")
    arrays = arrays_of(spec)
    mixed = gradients(call, arrays, spec.part_widths)
    for slot in range(spec.slots):
        own = np.where(arrays.slot == slot, slot, -1).astype(np.int32)
        alone = gradients(call, arrays._replace(slot=own), spec.part_widths)
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
    np.testing.assert_array_equal(dirty["a"][tail], 0)


def without_absent_scales(arrays):
    """The arguments with NaN for the scale of every part that is absent."""
    return arrays._replace(scale=np.where(arrays.rank > 0, arrays.scale, np.nan))


@pytest.mark.parametrize("implementation", ["xla", "xla_partitioned", "reference"])
def test_the_scale_of_an_absent_part_is_never_met(implementation):
    spec = small()
    arrays = arrays_of(spec)
    dirty = without_absent_scales(arrays)
    assert np.isnan(dirty.scale[arrays.slot]).any()
    call = functools.partial(lora_delta, implementation=implementation)
    outs = []
    for case in (arrays, dirty):
        positional, keywords = call_arguments(case, spec.part_widths)
        outs.append(call(*positional, **keywords))
    np.testing.assert_array_equal(*outs)
    wanted = gradients(call, arrays, spec.part_widths)
    found = gradients(call, dirty, spec.part_widths)
    for name in NAMES:
        np.testing.assert_array_equal(found[name], wanted[name])
    np.testing.assert_array_equal(found["scale"][arrays.rank == 0], 0)


def test_the_reference_itself_has_gradients_without_absent_scales():
    spec = small()
    arrays = arrays_of(spec)
    wanted = gradients(reference.lora_delta, arrays, spec.part_widths)
    dirty = without_absent_scales(arrays)
    found = gradients(reference.lora_delta, dirty, spec.part_widths)
    for name in NAMES:
        np.testing.assert_array_equal(found[name], wanted[name])


def test_an_infinite_input_or_strength_leaves_absent_parts_alone():
    spec = small(tokens=8, distribution="distinct", ranks=(3, 0, 5))
    arrays = arrays_of(spec)
    arrays.x[1], arrays.weight[2] = np.inf, np.inf
    wanted = arrays.y[:, 10:14]
    for implementation in ("xla", "xla_partitioned", "reference"):
        positional, keywords = call_arguments(arrays, spec.part_widths)
        out = lora_delta(*positional, **keywords, implementation=implementation)
        np.testing.assert_array_equal(out[:, 10:14], wanted)
        assert not np.isfinite(out[1:3, :10]).all()
    found = gradients(lora_delta, arrays, spec.part_widths)
    np.testing.assert_array_equal(found["scale"][:, 1], 0)
    np.testing.assert_array_equal(found["b"][:, :, 10:14], 0)


@pytest.mark.parametrize("wide", [(), ("a",), ("x", "y", "a", "b")], ids=str)
def test_products_of_float32_are_not_left_to_tf32(wide):
    spec = small(dtype="bfloat16")
    arrays, wider = arrays_of(spec), arrays_of(small())
    arrays = arrays._replace(**{name: getattr(wider, name) for name in wide})
    (x, g, a, b), keywords = call_arguments(arrays, spec.part_widths)
    widths = keywords.pop("part_widths")
    call = functools.partial(backward.lora_delta_backward, part_widths=widths)
    text = jax.jit(call).lower(x, g, a, b, **keywords).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert len(dots) >= 5
    precision = "[HIGHEST, HIGHEST]" if wide else "[DEFAULT, DEFAULT]"
    assert all(precision in line for line in dots)


def test_no_product_pays_for_the_rank_axis():
    spec = small(max_rank=256)
    (x, g, a, b), keywords = call_arguments(arrays_of(spec), spec.part_widths)
    widths = keywords.pop("part_widths")
    call = functools.partial(backward.lora_delta_backward, part_widths=widths)
    text = jax.jit(call).lower(x, g, a, b, **keywords).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert any(f"x{backward.RANK_BLOCK}x" in line for line in dots)
    assert not any(re.search(r"[<x]256x", line) for line in dots)


@pytest.mark.parametrize("max_rank", [33, 80])
def test_ranks_are_summed_block_by_block(max_rank):
    spec = small(ranks=(31, 0, 2, 32, 33, 80), max_rank=80, distribution="distinct")
    arrays = arrays_of(spec)
    rank = np.minimum(arrays.rank, max_rank)
    arrays = arrays._replace(
        a=arrays.a[:, :, :max_rank], b=arrays.b[:, :max_rank], rank=rank
    )
    (x, g, a, b), keywords = call_arguments(arrays, spec.part_widths)
    found = backward.lora_delta_backward(x, g, a, b, **keywords)
    wanted = expected_gradients(arrays, spec.part_widths)
    for name, got, want in zip(found._fields, found, wanted, strict=True):
        error = np.abs(np.asarray(got, np.float64) - want)
        assert error.max() <= TOLERANCE["float32"] * max(1.0, np.abs(want).max()), name
        assert not np.asarray(got)[want == 0].any(), name


@IMPLEMENTATIONS
def test_remat_gives_the_same_gradients(implementation):
    function = functools.partial(lora_delta, implementation=implementation)
    spec = small()
    arrays = arrays_of(spec)
    plain = gradients(function, arrays, spec.part_widths)

    def remat(x, y, a, b, *, part_widths, **keywords):
        call = functools.partial(function, part_widths=part_widths)
        return jax.checkpoint(call)(x, y, a, b, **keywords)

    again = gradients(remat, arrays, spec.part_widths)
    for name in NAMES:
        np.testing.assert_array_equal(again[name], plain[name])


@IMPLEMENTATIONS
def test_adapters_train_together_under_vmap_of_the_batch(implementation):
    call = functools.partial(lora_delta, implementation=implementation)
    spec = small()
    arrays = arrays_of(spec)
    positional, keywords = call_arguments(arrays, spec.part_widths)
    x, y, a, b = positional
    xs, ys = jnp.stack([x, 2 * x, -x]), jnp.stack([y, y, y])

    def one(x, y):
        return call(x, y, a, b, **keywords)

    def total(a, x, y):
        return jnp.sum(call(x, y, a, b, **keywords) ** 2)

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
