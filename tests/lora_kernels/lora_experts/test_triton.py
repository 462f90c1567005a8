"""lora_experts on the Triton kernels, in Triton's interpreter, against float64."""

import numpy as np
import pytest

import triton_interpreter
from delta_cases import TOLERANCE, expected_gradients
from expert_cases import (
    CASES,
    DOWN,
    backend_arguments,
    expected_experts,
    expert_arrays,
    small,
    untouched,
)

# The interpreter needs Triton, of the extra gpu-check, and torch, of the extra oracle.
pytestmark = [pytest.mark.gpu_compile, pytest.mark.torch]

FORMS = {
    "decode": {},
    "decode-of-pairs-alone": {"slots": 32},
    "decode-of-many-slots": {"tokens": 90, "slots": 60},
    "prefill": {"tokens": 90, "slots": 2},
}
"""Of 270 pairs, more than the fused kernel takes unless slots are as many; of 39 pairs
that need not be grouped, as virtual slots are four times as many."""

SITES = {"shared-rows": {}, "own-rows": DOWN}


@pytest.fixture(scope="module")
def interpreter():
    with triton_interpreter.interpreter() as process:
        yield process


@pytest.fixture
def run(interpreter):
    def call(module, arrays, widths):
        task = interpreter.submit(
            triton_interpreter.forward, module, arrays, widths, backend_arguments
        )
        return task.result()

    return call


def assert_equals_float64(out, arrays, widths, dtype):
    want = expected_experts(arrays, widths)
    np.testing.assert_allclose(out.astype(np.float64), want, **TOLERANCE[dtype])
    base = untouched(arrays)
    np.testing.assert_array_equal(out[base], arrays.y[base])
    assert out.dtype == arrays.y.dtype


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_equals_dense_experts_in_float64(run, case):
    arrays = expert_arrays(case)
    out = run("triton", arrays, case.part_widths)
    assert_equals_float64(out, arrays, case.part_widths, "float32")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("max_rank", [8, 40], ids=["one-rank-block", "many"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("site", SITES)
def test_every_form_equals_float64(run, dtype, max_rank, form, site):
    case = small(dtype=dtype, max_rank=max_rank, **FORMS[form], **SITES[site])
    arrays = expert_arrays(case)
    out = run("triton", arrays, case.part_widths)
    assert_equals_float64(out, arrays, case.part_widths, dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("site", SITES)
def test_poison_never_reaches_a_pair_of_another_expert(run, form, site):
    case = small(max_rank=20, **FORMS[form], **SITES[site])
    arrays = expert_arrays(case)
    clean = run("triton", arrays, case.part_widths)
    a, b, x = arrays.a.copy(), arrays.b.copy(), arrays.x.copy()
    a[np.arange(20) >= arrays.rank[..., None]] = np.nan
    rank_of_column = np.repeat(arrays.rank, case.part_widths, axis=2)
    b[np.arange(20)[:, None] >= rank_of_column[:, :, None, :]] = np.nan
    a[:, 3], b[:, 3] = np.nan, np.nan
    x[np.repeat(arrays.slot < 0, len(x) // case.tokens)] = np.nan
    scale = np.where(arrays.rank > 0, arrays.scale, np.nan).astype(np.float32)
    dirty = run("triton", arrays._replace(a=a, b=b, x=x, scale=scale), case.part_widths)
    hit = (arrays.expert == 3) & ~untouched(arrays)
    assert hit.any()
    np.testing.assert_array_equal(dirty[~hit], clean[~hit])
    adapted = arrays.virtual.rank[arrays.virtual.slot].all(axis=1)
    assert not np.isfinite(dirty[hit & adapted]).any()


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_has_the_same_bits_whatever_else_is_in_the_batch(run, form):
    case = small(distribution="distinct", **FORMS[form])
    arrays = expert_arrays(case)
    together = run("triton_invariant", arrays, case.part_widths)
    assert_equals_float64(together, arrays, case.part_widths, "float32")
    token = np.arange(case.tokens) == 4
    alone = arrays._replace(slot=np.where(token, arrays.slot, -1))
    out = run("triton_invariant", alone, case.part_widths)
    pairs = np.repeat(token, case.chosen)
    assert (out[pairs] != arrays.y[pairs]).any()
    np.testing.assert_array_equal(out[pairs], together[pairs])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("site", SITES)
def test_gradients_equal_float64(interpreter, dtype, site):
    case = small(tokens=50, dtype=dtype, max_rank=9, **SITES[site])
    arrays = expert_arrays(case)
    widths = case.part_widths
    scale = np.where(arrays.rank > 0, arrays.scale, np.nan).astype(np.float32)
    task = interpreter.submit(
        triton_interpreter.backward,
        arrays._replace(scale=scale),
        widths,
        backend_arguments,
    )
    dx, *rest = expected_gradients(arrays.virtual, widths)
    dx = dx.reshape(len(arrays.x), -1, case.d_in).sum(axis=1)
    names = ("dx", "da", "db", "dscale", "dweight")
    for name, got, want in zip(names, task.result(), (dx, *rest), strict=True):
        tolerance = TOLERANCE[dtype]["atol"] * np.abs(want).max()
        error = np.abs(got.astype(np.float64) - want).max()
        assert error <= tolerance, f"{name}: {error} > {tolerance}"
        assert not got[want == 0].any(), f"{name}: not zero where it must be"
