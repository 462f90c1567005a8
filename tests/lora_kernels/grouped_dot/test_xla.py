"""The forms of the xla implementation against float64, and what must not leak."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grouped_cases import (
    TOLERANCE,
    arrays_of,
    covering_cases,
    expected,
    forward_arguments,
    local,
    poisoned,
    small,
)
from lora_kernels import grouped_dot
from lora_kernels.grouped_dot import xla_forms
from lora_kernels.grouped_dot.xla import batched_block, loop_block


def by_form(form, x, kernel, pairs):
    return form(x, kernel, pairs).astype(x.dtype)


FORMS = {
    "reference": functools.partial(grouped_dot, implementation="reference"),
    "chosen": functools.partial(grouped_dot, implementation="xla"),
    "loop": functools.partial(by_form, functools.partial(xla_forms.loop, block=8)),
    "batched": functools.partial(
        by_form, functools.partial(xla_forms.batched, block=16)
    ),
}


def run(form, arrays):
    return np.asarray(jax.jit(FORMS[form])(*forward_arguments(arrays)))


def assert_equals_float64(out, arrays, dtype):
    want = expected(arrays)
    np.testing.assert_allclose(out.astype(np.float64), want, **TOLERANCE[dtype])
    np.testing.assert_array_equal(out[~local(arrays)], 0)
    assert out.dtype == arrays.x.dtype


@pytest.mark.parametrize("case", covering_cases(), ids=lambda case: case.name)
def test_every_size_equals_float64(case):
    arrays = arrays_of(case)
    assert_equals_float64(run("chosen", arrays), arrays, case.dtype)


@pytest.mark.parametrize("case", covering_cases(12), ids=lambda case: case.name)
def test_the_form_for_accelerators_equals_float64(case):
    arrays = arrays_of(case)
    assert_equals_float64(run("batched", arrays), arrays, case.dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_form_equals_float64(form, dtype):
    case = small(dtype=dtype, rows=40, d_in=30)
    arrays = arrays_of(case)
    assert_equals_float64(run(form, arrays), arrays, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tile_rows", [1, 5, 24, 100])
def test_kernels_larger_than_a_tile_equal_float64(monkeypatch, dtype, tile_rows):
    arrays = arrays_of(small(dtype=dtype))
    monkeypatch.setattr(xla_forms, "TILE_BYTES", tile_rows * 21 * 4)
    assert_equals_float64(run("loop", arrays), arrays, dtype)


@pytest.mark.parametrize("together", [1, 3])
def test_kernels_beyond_the_memory_of_one_step_equal_float64(monkeypatch, together):
    arrays = arrays_of(small(rows=40, spread="zipf"))
    monkeypatch.setattr(xla_forms, "GATHERED_BYTES", together * 24 * 21 * 4)
    assert_equals_float64(run("batched", arrays), arrays, "float32")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", [1, 4], ids=["of-other-pairs", "idle"])
def test_poison_never_reaches_a_pair(form, group):
    case = small(rows=40, per_row=1)
    arrays = arrays_of(case)
    arrays = arrays._replace(group=np.where(arrays.group == 4, 3, arrays.group))
    dirty = poisoned(arrays, [group])
    assert np.isnan(dirty.x).any()
    clean, out = run(form, arrays), run(form, dirty)
    spared = arrays.group != group
    np.testing.assert_array_equal(out[spared], clean[spared])
    assert np.isnan(out[~spared]).all()


@pytest.mark.parametrize("form", FORMS)
def test_an_infinite_number_in_a_kernel_stays_in_its_column(form):
    arrays = arrays_of(small(rows=30, spread="uniform"))
    arrays.kernel[2, 7, 3] = np.inf
    out, want = run(form, arrays), expected(arrays)
    np.testing.assert_allclose(out, want, **TOLERANCE["float32"])
    assert np.isinf(out).any()
    assert not np.isnan(out).any()


SHARES = [(24, 8), (150, 4), (400, 3)]
"""Rows and groups that make loop steps of 4, 32 and 64 rows, each row of two pairs."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "groups"), SHARES)
def test_a_pair_has_the_same_bits_whatever_else_is_in_the_batch(rows, groups, dtype):
    case = small(
        rows=rows, per_row=2, groups=groups, d_in=300, d_out=210, dtype=dtype,
        spread="uniform",
    )  # fmt: skip
    arrays = arrays_of(case)
    alone = run("chosen", arrays)
    rng = np.random.default_rng(1)
    for keep in (0.2, 0.5, 0.9):
        others = rng.integers(-1, groups, rows * 2)
        kept = rng.random(rows * 2) < keep
        group = np.where(kept, arrays.group, others).astype(np.int32)
        out = run("chosen", arrays._replace(group=group))
        same = group == arrays.group
        np.testing.assert_array_equal(out[same], alone[same])
        assert (out[~same] != alone[~same]).any(axis=1).all()


def test_a_row_has_the_same_bits_at_every_place_of_its_batch():
    arrays = arrays_of(small(rows=90, per_row=1, d_in=300, d_out=130, spread="zipf"))
    order = np.random.default_rng(0).permutation(90)
    moved = arrays._replace(x=arrays.x[order], group=arrays.group[order])
    np.testing.assert_array_equal(run("chosen", moved), run("chosen", arrays)[order])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_only_kernels_in_use_are_read_on_a_cpu(dtype):
    arrays = arrays_of(small(groups=64, d_in=64, d_out=64, dtype=dtype))
    call = jax.jit(FORMS["chosen"]).lower(*forward_arguments(arrays)).compile()
    whole = arrays.kernel.size * (2 if dtype == "bfloat16" else 0)
    temp = call.memory_analysis().temp_size_in_bytes
    assert temp < whole + 20 * 64 * 64 * 4


def test_the_chosen_blocks_are_powers_of_two_within_their_bounds():
    for pairs in range(1, 20000, 137):
        for groups in (1, 2, 8, 33, 128, 1000):
            loop, batch = loop_block(pairs, groups), batched_block(pairs, groups)
            assert loop & (loop - 1) == 0 == batch & (batch - 1)
            assert 1 <= loop <= 64
            assert 16 <= batch <= 128
    assert [loop_block(p, 8) for p in (1, 16, 256, 512, 8192)] == [1, 4, 16, 32, 64]


def test_a_mixed_call_takes_the_dtype_of_x():
    arrays = arrays_of(small())
    x, kernel, pairs = forward_arguments(arrays)
    out = grouped_dot(x, kernel.astype(jnp.bfloat16), pairs)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected(arrays), **TOLERANCE["bfloat16"])
