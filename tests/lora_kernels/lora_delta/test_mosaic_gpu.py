"""The Mosaic GPU kernels in JAX's interpreter, races detected, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu import core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import (
    InterpretGPUParams,
    force_gpu_interpret_mode,
)
from jax.interpreters import mlir

from delta_cases import TOLERANCE, call_arguments, expected, small
from lora_kernels import make_routing
from lora_kernels.gpu_targets import building_for, described_gpu
from lora_kernels.lora_delta import mosaic_gpu, mosaic_kernels
from lora_kernels.lora_delta.specs import arrays_of

# Private modules of one JAX, and an interpreter that takes minutes a site.
pytestmark = pytest.mark.gpu_compile

SITE = {
    "d_in": 128,
    "part_widths": (64, 128),
    "ranks": (16, 7, 0, 3),
    "slots": 2,
    "dtype": "bfloat16",
}


@pytest.fixture(autouse=True, scope="module")
def layouts():
    # The interpreter keeps no layouts, and has no rule for a change of layout.
    mlir.register_lowering(
        core.layout_cast_p, lambda _, array, **__: [array], platform="cpu"
    )


def interpreted(function, *arguments, gpu="h100"):
    """What a function returns, and whether each kernel that it ran had a race.

    The interpreter keeps what it has seen of one kernel until the next one, and only
    prints a race.
    """
    kernels = []

    def seen(**keywords):
        kernels.append(state_of_kernel(**keywords))
        return kernels[-1]

    state_of_kernel = gpu_callbacks.RaceDetectionState
    races = force_gpu_interpret_mode(InterpretGPUParams(detect_races=True))
    with pytest.MonkeyPatch.context() as patch, building_for(described_gpu(gpu)), races:
        patch.setattr(gpu_callbacks, "RaceDetectionState", seen)
        out = np.asarray(function(*arguments))
    return out, [kernel.races_found for kernel in kernels]


def run(arrays, widths, gpu="h100"):
    positional, keywords = call_arguments(arrays, widths)
    out, races = interpreted(
        lambda: mosaic_gpu.lora_delta(*positional, **keywords), gpu=gpu
    )
    assert races == ([False, False] if out.size else [])
    return out


def assert_equals_float64(out, arrays, widths):
    want = expected(arrays, widths)
    np.testing.assert_allclose(out.astype(np.float64), want, **TOLERANCE["bfloat16"])
    base = arrays.slot < 0
    np.testing.assert_array_equal(out[base], arrays.y[base])


def test_decode_equals_float64_and_poison_stays_out():
    spec = small(**SITE, tokens=9, max_rank=16)
    arrays = arrays_of(spec)
    clean = run(arrays, spec.part_widths)
    assert_equals_float64(clean, arrays, spec.part_widths)
    a, b, x = arrays.a.copy(), arrays.b.copy(), arrays.x.copy()
    row = np.arange(16)
    a[row >= arrays.rank[:, :, None]] = np.nan
    rank_of_column = np.repeat(arrays.rank, spec.part_widths, axis=1)
    b[row[None, :, None] >= rank_of_column[:, None, :]] = np.nan
    x[arrays.slot < 0] = np.nan
    dirty = run(arrays._replace(a=a, b=b, x=x), spec.part_widths)
    np.testing.assert_array_equal(dirty, clean)


def test_tokens_that_share_a_row_of_x_equal_float64():
    spec = small(**SITE, tokens=9, max_rank=16)
    arrays = arrays_of(spec)
    repeated = arrays._replace(x=np.repeat(arrays.x[:3], 3, axis=0))
    out = run(arrays._replace(x=arrays.x[:3]), spec.part_widths)
    assert_equals_float64(out, repeated, spec.part_widths)


def test_prefill_over_two_rank_tiles_equals_float64():
    site = SITE | {"part_widths": (64,), "ranks": (70, 33)}
    spec = small(**site, tokens=258, max_rank=80, distribution="identical")
    arrays = arrays_of(spec)
    keep = np.arange(spec.tokens) % 4 == 0
    arrays = arrays._replace(slot=np.where(keep, arrays.slot, -1))
    assert_equals_float64(run(arrays, spec.part_widths), arrays, spec.part_widths)


def test_a_copy_that_is_not_waited_for_is_a_race(monkeypatch):
    spec = small(**(SITE | {"d_in": 64, "part_widths": (64,)}), tokens=3, max_rank=16)
    positional, keywords = call_arguments(arrays_of(spec), spec.part_widths)
    monkeypatch.setattr(mosaic_kernels.plgpu, "barrier_wait", lambda _: None)
    _, races = interpreted(lambda: mosaic_gpu.lora_delta(*positional, **keywords))
    # JAX does not look at what a wgmma reads, so only at expand's own reads of B.
    assert races == [False, True]


def test_a_batch_of_batches_equals_each_alone():
    spec = small(**(SITE | {"d_in": 64, "part_widths": (64,)}), tokens=3, max_rank=16)
    positional, keywords = call_arguments(arrays_of(spec), spec.part_widths)
    del keywords["routing"]

    def one(slot, *arrays):
        routing = make_routing(slot, spec.slots)
        return mosaic_gpu.lora_delta(*arrays, **keywords, routing=routing)

    both = [jnp.stack([array, 2 * array]) for array in positional]
    slots = jnp.array([[0, 1, -1], [1, 1, 0]], jnp.int32)
    together, races = interpreted(jax.vmap(one), slots, *both)
    assert races == [False, False]
    for index, out in enumerate(together):
        alone, _ = interpreted(one, slots[index], *(array[index] for array in both))
        np.testing.assert_array_equal(out, alone)


REFUSALS = [
    ({}, "a100", r"needs compute capability 9.0 \(Hopper\); found 8.0"),
    ({"dtype": "float16"}, "h100", "x is float16; supported: bfloat16"),
    ({"d_in": 100}, "h100", "d_in 100 and max_rank 16 must be multiples of 64 and 16"),
    ({"max_rank": 24}, "h100", "d_in 128 and max_rank 24 must be multiples"),
    ({"part_widths": (64, 33)}, "h100", r"part widths \(64, 33\) must be multiples"),
]


@pytest.mark.parametrize(("change", "gpu", "reason"), REFUSALS)
def test_what_is_not_supported_is_refused_by_name(change, gpu, reason):
    spec = small(**(SITE | {"max_rank": 16} | change))
    with pytest.raises(NotImplementedError, match=reason):
        run(arrays_of(spec), spec.part_widths, gpu)


def test_copies_of_too_many_rows_are_refused(monkeypatch):
    spec = small(**SITE, max_rank=16)
    monkeypatch.setattr(mosaic_gpu, "COPY_BYTES", 1000)
    with pytest.raises(NotImplementedError, match=r"copied to \d+ bytes; at most 1000"):
        run(arrays_of(spec), spec.part_widths)


def test_no_rows_give_no_rows():
    spec = small(**SITE, tokens=0, max_rank=16)
    arrays = arrays_of(spec)
    assert run(arrays, spec.part_widths).shape == (0, 192)
    assert jnp.bfloat16 == arrays.y.dtype
