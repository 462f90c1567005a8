"""The Triton kernels in Triton's interpreter, against float64, forward and backward."""

import itertools

import numpy as np
import pytest

import triton_interpreter
from grouped_cases import (
    TOLERANCE,
    arrays_of,
    backward_arguments,
    covering_cases,
    expected,
    expected_gradients,
    forward_arguments,
    local,
    poisoned,
    small,
)
from lora_kernels.gpu_targets import Gpu, building_for

# The interpreter needs Triton, of the extra gpu-check, and torch, of the extra oracle.
pytestmark = [pytest.mark.gpu_compile, pytest.mark.torch]

PACKAGE = "lora_kernels.grouped_dot"

LARGEST = 2e7
"""Most multiplications in a case: the interpreter runs program after program."""


@pytest.fixture(scope="module")
def interpreter():
    with triton_interpreter.interpreter() as process:
        yield process


@pytest.fixture
def run(interpreter):
    def call(arrays):
        task = interpreter.submit(
            triton_interpreter.results,
            f"{PACKAGE}.triton",
            "grouped_dot",
            arrays,
            forward_arguments,
        )
        return task.result()[0]

    return call


@pytest.fixture
def gradients(interpreter):
    def call(arrays):
        task = interpreter.submit(
            triton_interpreter.results,
            f"{PACKAGE}.triton_backward",
            "grouped_dot_backward",
            arrays,
            backward_arguments,
        )
        return task.result()

    return call


def assert_equals_float64(out, arrays, dtype):
    want = expected(arrays)
    np.testing.assert_allclose(out.astype(np.float64), want, **TOLERANCE[dtype])
    np.testing.assert_array_equal(out[~local(arrays)], 0)
    assert out.dtype == arrays.x.dtype


@pytest.mark.parametrize(
    "case",
    covering_cases(limit=LARGEST),
    ids=lambda case: case.name,
)
def test_every_size_equals_float64(run, case):
    arrays = arrays_of(case)
    assert_equals_float64(run(arrays), arrays, case.dtype)


SHARES = {"few": {"rows": 20}, "some": {"rows": 60}, "many": {"rows": 300}}
"""Changes of a case of three groups and three pairs a row that choose each row tile."""

SHAPES = {
    "even": {"d_in": 128, "d_out": 128},
    "masked": {"d_in": 48, "d_out": 80},
    "unaligned": {"d_in": 33, "d_out": 70},
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", SHARES)
def test_every_tile_equals_float64(run, share, shape, dtype):
    case = small(groups=3, dtype=dtype, **SHARES[share], **SHAPES[shape])
    arrays = arrays_of(case)
    assert_equals_float64(run(arrays), arrays, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", ["few", "some"])
def test_gradients_equal_float64(gradients, share, shape, dtype):
    case = small(groups=3, dtype=dtype, **SHARES[share], **SHAPES[shape])
    clean = arrays_of(case)
    clean = clean._replace(group=np.where(clean.group == 1, 2, clean.group))
    for name, got, want in zip(
        ("dx", "dkernel"),
        gradients(poisoned(clean, [1])),
        expected_gradients(clean),
        strict=True,
    ):
        tolerance = TOLERANCE[dtype]["atol"] * np.abs(want).max()
        got = np.nan_to_num(got) if name == "dx" else got
        error = np.abs(got.astype(np.float64) - want).max()
        assert error <= tolerance, f"{name}: {error} > {tolerance}"
        assert not got[want == 0].any(), f"{name}: not zero where it must be"


@pytest.mark.parametrize("spread", ["one", "all_remote", "uniform"])
@pytest.mark.parametrize("rows", [1, 16, 17])
def test_few_rows_equal_float64(run, rows, spread):
    arrays = arrays_of(small(rows=rows, per_row=1, spread=spread))
    assert_equals_float64(run(arrays), arrays, "float32")


def test_each_array_may_have_its_own_dtype(run):
    arrays = {dtype: arrays_of(small(dtype=dtype)) for dtype in TOLERANCE}
    for of_x, of_kernel in itertools.permutations(TOLERANCE, 2):
        mixed = arrays[of_x]._replace(kernel=arrays[of_kernel].kernel)
        assert_equals_float64(run(mixed), mixed, of_x)


@pytest.mark.parametrize("group", [1, 4], ids=["of-other-pairs", "idle"])
@pytest.mark.parametrize("rows", [40, 200], ids=["few", "some"])
def test_poison_never_reaches_a_pair(run, rows, group):
    arrays = arrays_of(small(rows=rows, per_row=1))
    arrays = arrays._replace(group=np.where(arrays.group == 4, 3, arrays.group))
    clean, out = run(arrays), run(poisoned(arrays, [group]))
    spared = arrays.group != group
    np.testing.assert_array_equal(out[spared], clean[spared])
    assert np.isnan(out[~spared]).all()


def test_a_pair_has_the_same_bits_whatever_else_is_in_the_batch(run):
    arrays = arrays_of(small(rows=40, spread="uniform"))
    together = run(arrays)
    alone = np.where(np.arange(120) == 77, arrays.group, -1).astype(np.int32)
    np.testing.assert_array_equal(run(arrays._replace(group=alone))[77], together[77])


def test_what_is_not_supported_is_refused_by_name(monkeypatch):
    import jax_triton

    from lora_kernels.grouped_dot import triton

    x, kernel, pairs = forward_arguments(arrays_of(small()))
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        triton.grouped_dot(x, kernel, pairs)
    with (
        building_for(Gpu(75, 40)),
        pytest.raises(NotImplementedError, match=r"8\.0 \(Ampere\); found 7\.5"),
    ):
        triton.grouped_dot(x, kernel, pairs)
    with building_for(Gpu(90, 132)):
        with pytest.raises(NotImplementedError, match="x is float8_e4m3fn; supported"):
            triton.grouped_dot(x.astype("float8_e4m3fn"), kernel, pairs)
        with pytest.raises(NotImplementedError, match="an axis of length 0"):
            triton.grouped_dot(x[:, :0], kernel[:, :0], pairs)
        monkeypatch.setattr(triton, "OFFSETS", 600)
        with pytest.raises(NotImplementedError, match="the output has 819 numbers"):
            triton.grouped_dot(x, kernel, pairs)
        monkeypatch.setattr(jax_triton, "__version__", "0.4.1")
        with pytest.raises(NotImplementedError, match=r"install jax-triton==0\.3\.1"):
            triton.grouped_dot(x, kernel, pairs)
