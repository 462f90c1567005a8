"""The Triton kernels in Triton's interpreter, against float64, forward and backward."""

import numpy as np
import pytest

import triton_interpreter
from delta_cases import (
    TOLERANCE,
    call_arguments,
    covering_cases,
    expected,
    expected_gradients,
    small,
)
from lora_kernels.gpu_targets import Gpu, building_for
from lora_kernels.lora_delta.specs import arrays_of

# The interpreter needs Triton, of the extra gpu-check, and torch, of the extra oracle.
pytestmark = [pytest.mark.gpu_compile, pytest.mark.torch]

MODULES = ("triton", "triton_invariant")

LARGEST = 2e7
"""Most multiplications in a case: the interpreter runs program after program."""

LONG = {"tokens": 300, "slots": 3}
"""More rows than the fused kernel takes: the two kernels for prefill run."""


@pytest.fixture(scope="module")
def interpreter():
    with triton_interpreter.interpreter() as process:
        yield process


@pytest.fixture
def run(interpreter):
    def call(module, arrays, widths):
        task = interpreter.submit(triton_interpreter.forward, module, arrays, widths)
        return task.result()

    return call


def assert_equals_float64(out, arrays, widths, dtype):
    want = expected(arrays, widths)
    np.testing.assert_allclose(out.astype(np.float64), want, **TOLERANCE[dtype])
    base = arrays.slot < 0
    np.testing.assert_array_equal(out[base], arrays.y[base])
    assert out.dtype == arrays.y.dtype


@pytest.mark.parametrize(
    "spec",
    covering_cases(limit=LARGEST),
    ids=lambda spec: spec.name,
)
def test_every_size_equals_float64(run, spec):
    arrays = arrays_of(spec)
    out = run("triton", arrays, spec.part_widths)
    assert_equals_float64(out, arrays, spec.part_widths, spec.dtype)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("max_rank", [8, 40], ids=["one-rank-block", "many"])
@pytest.mark.parametrize("long", [{}, LONG], ids=["decode", "prefill"])
def test_every_form_equals_float64(run, module, dtype, max_rank, long):
    spec = small(dtype=dtype, max_rank=max_rank, **long)
    arrays = arrays_of(spec)
    out = run(module, arrays, spec.part_widths)
    assert_equals_float64(out, arrays, spec.part_widths, dtype)


@pytest.mark.parametrize("tokens", [0, 1, 2, 16, 17])
@pytest.mark.parametrize("distribution", ["identical", "distinct", "all_base"])
def test_few_rows_equal_float64(run, tokens, distribution):
    spec = small(tokens=tokens, distribution=distribution)
    arrays = arrays_of(spec)
    out = run("triton", arrays, spec.part_widths)
    assert_equals_float64(out, arrays, spec.part_widths, "float32")


def test_each_array_may_have_its_own_dtype(run):
    spec = small()
    wide, narrow = arrays_of(spec), arrays_of(small(dtype="bfloat16"))
    for fields in ({"a"}, {"b"}, {"x"}, {"y"}, {"a", "b"}):
        mixed = wide._replace(**{name: getattr(narrow, name) for name in fields})
        out = run("triton", mixed, spec.part_widths)
        dtype = "bfloat16" if "y" in fields else "float32"
        assert_equals_float64(out, mixed, spec.part_widths, dtype)


def poisoned(arrays, widths, slots):
    """The arguments with NaN in rank tails, in `slots`, in base rows and in the scale
    of absent parts."""
    a, b, x = arrays.a.copy(), arrays.b.copy(), arrays.x.copy()
    weight = arrays.weight.copy()
    scale = np.where(arrays.rank > 0, arrays.scale, np.nan).astype(np.float32)
    row = np.arange(a.shape[2])
    a[row >= arrays.rank[:, :, None]] = np.nan
    rank_of_column = np.repeat(arrays.rank, widths, axis=1)
    b[row[None, :, None] >= rank_of_column[:, None, :]] = np.nan
    a[slots], b[slots], scale[slots] = np.nan, np.nan, np.nan
    x[arrays.slot < 0] = np.nan
    weight[arrays.slot < 0] = np.nan
    return arrays._replace(a=a, b=b, x=x, scale=scale, weight=weight)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("long", [{}, LONG], ids=["decode", "prefill"])
@pytest.mark.parametrize("slot", [0, 2], ids=["of-other-rows", "unused"])
def test_poison_never_reaches_a_row(run, module, long, slot):
    spec = small(**long, max_rank=20)
    arrays = arrays_of(spec)
    arrays = arrays._replace(slot=np.where(arrays.slot == 2, 1, arrays.slot))
    clean = run(module, arrays, spec.part_widths)
    dirty = run(module, poisoned(arrays, spec.part_widths, [slot]), spec.part_widths)
    spared = arrays.slot != slot
    np.testing.assert_array_equal(dirty[spared], clean[spared])
    hit = ~spared & (arrays.rank[arrays.slot] > 0).all(axis=1)
    assert not np.isfinite(dirty[hit]).any()


@pytest.mark.parametrize("long", [{}, LONG], ids=["decode", "prefill"])
def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch(run, long):
    spec = small(**long, distribution="distinct")
    arrays = arrays_of(spec)
    together = run("triton_invariant", arrays, spec.part_widths)
    alone = arrays._replace(slot=np.where(np.arange(spec.tokens) == 7, arrays.slot, -1))
    out = run("triton_invariant", alone, spec.part_widths)
    assert arrays.rank[arrays.slot[7]].any()
    np.testing.assert_array_equal(out[7], together[7])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("max_rank", [8, 40], ids=["one-rank-block", "many"])
def test_gradients_equal_float64(interpreter, dtype, max_rank):
    spec = small(tokens=130, dtype=dtype, max_rank=max_rank)
    clean = arrays_of(spec)
    arrays = poisoned(clean, spec.part_widths, [])
    task = interpreter.submit(triton_interpreter.backward, arrays, spec.part_widths)
    for name, got, want in zip(
        ("dx", "da", "db", "dscale", "dweight"),
        task.result(),
        expected_gradients(clean, spec.part_widths),
        strict=True,
    ):
        tolerance = TOLERANCE[dtype]["atol"] * np.abs(want).max()
        error = np.abs(got.astype(np.float64) - want).max()
        assert error <= tolerance, f"{name}: {error} > {tolerance}"
        assert not got[want == 0].any(), f"{name}: not zero where it must be"


GRADIENTS = ("dx", "da", "db", "dscale", "dweight")


def gradients(interpreter, arrays, widths):
    task = interpreter.submit(triton_interpreter.backward, arrays, widths)
    return dict(zip(GRADIENTS, task.result(), strict=True))


def test_a_mixed_batch_gives_each_adapter_its_gradient_alone(interpreter):
    spec = small(tokens=40, distribution="distinct")
    arrays = arrays_of(spec)
    mixed = gradients(interpreter, arrays, spec.part_widths)
    for slot in range(spec.slots):
        rows, others = arrays.slot == slot, np.arange(spec.slots) != slot
        own = np.where(rows, slot, -1).astype(np.int32)
        alone = gradients(interpreter, arrays._replace(slot=own), spec.part_widths)
        for name in ("da", "db", "dscale"):
            np.testing.assert_array_equal(alone[name][slot], mixed[name][slot])
            np.testing.assert_array_equal(alone[name][others], 0)
        for name in ("dx", "dweight"):
            np.testing.assert_array_equal(alone[name][rows], mixed[name][rows])
            np.testing.assert_array_equal(alone[name][~rows], 0)
        assert np.abs(alone["db"][slot]).max() > 0.1


def test_poison_of_one_adapter_reaches_no_other_gradient(interpreter):
    spec = small(tokens=40)
    arrays = arrays_of(spec)
    clean = gradients(interpreter, arrays, spec.part_widths)
    poison = poisoned(arrays, spec.part_widths, [0])
    dirty = gradients(interpreter, poison, spec.part_widths)
    rows, slots = arrays.slot != 0, np.arange(spec.slots) != 0
    assert (arrays.slot < 0).any()
    for name in ("dx", "dweight"):
        np.testing.assert_array_equal(dirty[name][rows], clean[name][rows])
    for name in ("da", "db", "dscale"):
        np.testing.assert_array_equal(dirty[name][slots], clean[name][slots])
    tail = np.arange(spec.rank_axis) >= arrays.rank[:, :, None]
    assert tail[0].any()
    np.testing.assert_array_equal(dirty["da"][tail], 0)


def test_what_is_not_supported_is_refused_by_name(monkeypatch):
    import jax_triton

    from lora_kernels.lora_delta import triton

    spec = small()
    positional, keywords = call_arguments(arrays_of(spec), spec.part_widths)
    x, y, a, b = positional
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        triton.lora_delta(x, y, a, b, **keywords)
    with (
        building_for(Gpu(75, 40)),
        pytest.raises(NotImplementedError, match=r"8\.0 \(Ampere\); found 7\.5"),
    ):
        triton.lora_delta(x, y, a, b, **keywords)
    with building_for(Gpu(90, 132)):
        with pytest.raises(NotImplementedError, match="x is float8_e4m3fn; supported"):
            triton.lora_delta(x.astype("float8_e4m3fn"), y, a, b, **keywords)
        monkeypatch.setattr(triton, "OFFSETS", 500)
        with pytest.raises(NotImplementedError, match=r"x .* has 552 numbers"):
            triton.lora_delta(x, y, a, b, **keywords)
        monkeypatch.setattr(jax_triton, "__version__", "0.4.1")
        with pytest.raises(NotImplementedError, match=r"install jax-triton==0\.3\.1"):
            triton.lora_delta(x, y, a, b, **keywords)
