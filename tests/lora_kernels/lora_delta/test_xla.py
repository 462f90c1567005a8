"""The forms of the xla implementation against float64, and what must not leak."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from delta_cases import (
    RANKS,
    TOKENS,
    TOLERANCE,
    call_arguments,
    covering_cases,
    expected,
    small,
)
from lora_kernels import lora_delta
from lora_kernels.lora_delta import xla_cpu_forms, xla_forms, xla_partitioned
from lora_kernels.lora_delta.site import Site
from lora_kernels.lora_delta.specs import arrays_of
from lora_kernels.lora_delta.xla import batched_block, few_fits, flat_fits, loop_block

GATHER_ELEMENTS = 2e7
"""Most elements of the copies that the forms for accelerators make on a CPU."""


def by_form(form, x, y, a, b, *, scale, rank, routing, part_widths):
    site = Site(a, b, scale, rank, part_widths)
    return form(x, y, site, routing)


FORMS = {
    "chosen": functools.partial(lora_delta, implementation="xla"),
    "loop": functools.partial(by_form, functools.partial(xla_cpu_forms.loop, block=8)),
    "flat": functools.partial(by_form, xla_cpu_forms.flat),
    "few": functools.partial(by_form, xla_cpu_forms.few),
    "gather": functools.partial(by_form, xla_forms.gather),
    "batched": functools.partial(
        by_form, functools.partial(xla_forms.batched, block=16)
    ),
    "partitioned": functools.partial(
        by_form, functools.partial(xla_partitioned.batched, block=16)
    ),
    "partitioned, chosen": functools.partial(
        lora_delta, implementation="xla_partitioned"
    ),
}


def run(form, arrays, part_widths):
    positional, keywords = call_arguments(arrays, part_widths)
    statics = {"part_widths": keywords.pop("part_widths")}
    call = jax.jit(functools.partial(FORMS[form], **statics))
    return np.asarray(call(*positional, **keywords))


def assert_equals_float64(out, arrays, spec):
    want = expected(arrays, spec.part_widths)
    tolerance = TOLERANCE[spec.dtype]
    np.testing.assert_allclose(out.astype(np.float64), want, **tolerance)
    base = arrays.slot < 0
    np.testing.assert_array_equal(out[base], arrays.y[base])
    assert out.dtype == arrays.y.dtype
    adapted = ~base & (arrays.rank.max(axis=1)[arrays.slot] > 0)
    change = np.abs(want - arrays.y.astype(np.float64)).max(axis=1, initial=0)
    if adapted.any():
        assert np.median(change[adapted]) > 10 * tolerance["atol"]


@pytest.mark.parametrize("spec", covering_cases(pairs=False), ids=lambda s: s.name)
def test_every_size_equals_float64(spec):
    arrays = arrays_of(spec)
    assert_equals_float64(run("chosen", arrays, spec.part_widths), arrays, spec)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(8))
def test_every_pair_of_sizes_equals_float64(share):
    for spec in covering_cases(pairs=True)[share::8]:
        arrays = arrays_of(spec)
        assert_equals_float64(run("chosen", arrays, spec.part_widths), arrays, spec)


def _by_form():
    """Yields every case with every form; each case quickly with one of them."""
    cases = covering_cases(limit=GATHER_ELEMENTS, tokens=TOKENS[1:])
    forms = ["flat", "few", "gather", "batched", "partitioned"]
    for number, spec in enumerate(cases):
        for form in forms:
            slow = form != forms[number % len(forms)]
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(form, spec, marks=marks, id=f"{spec.name}-{form}")


@pytest.mark.parametrize(("form", "spec"), list(_by_form()))
def test_forms_for_accelerators_equal_float64(form, spec):
    arrays = arrays_of(spec)
    assert_equals_float64(run(form, arrays, spec.part_widths), arrays, spec)


@pytest.mark.parametrize("cap", [512, None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_ranks_in_one_batch_below_a_larger_cap(cap, dtype):
    spec = small(
        tokens=40, slots=len(RANKS), d_in=100, ranks=RANKS, max_rank=cap, dtype=dtype
    )
    spec = small(**{**vars(spec), "distribution": "distinct", "part_widths": (32,)})
    arrays = arrays_of(spec)
    assert_equals_float64(run("chosen", arrays, spec.part_widths), arrays, spec)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [0, 1, 23])
def test_small_batches_equal_float64(form, tokens):
    spec = small(tokens=tokens)
    arrays = arrays_of(spec)
    if tokens or "chosen" in form:
        assert_equals_float64(run(form, arrays, spec.part_widths), arrays, spec)


def poisoned(arrays, part_widths, slots, value):
    """Returns the arguments with `value` in rank tails, in `slots`, in base rows."""
    a, b, x = arrays.a.copy(), arrays.b.copy(), arrays.x.copy()
    weight = arrays.weight.copy()
    row = np.arange(a.shape[2])
    a[row >= arrays.rank[:, :, None]] = value
    rank_of_column = np.repeat(arrays.rank, part_widths, axis=1)
    b[row[None, :, None] >= rank_of_column[:, None, :]] = value
    a[slots], b[slots] = value, value
    x[arrays.slot < 0] = value
    weight[arrays.slot < 0] = value
    return arrays._replace(a=a, b=b, x=x, weight=weight)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("slots", [[4], [0, 2]], ids=["unused", "of-other-rows"])
def test_poison_never_reaches_a_row(form, value, slots):
    spec = small(slots=5, distribution="half_base")
    arrays = arrays_of(spec)
    arrays = arrays._replace(slot=np.where(arrays.slot == 4, 3, arrays.slot))
    clean = run(form, arrays, spec.part_widths)
    dirty = run(
        form, poisoned(arrays, spec.part_widths, slots, value), spec.part_widths
    )
    spared = ~np.isin(arrays.slot, slots)
    np.testing.assert_array_equal(dirty[spared], clean[spared])
    assert spared.sum() > 10
    hit = ~spared & (arrays.rank[arrays.slot] > 0).all(axis=1)
    assert not np.isfinite(dirty[hit]).any()


@pytest.mark.parametrize("form", FORMS)
def test_float16_overflow_of_one_adapter_stays_its_own(form):
    spec = small(dtype="float16")
    arrays = arrays_of(spec)
    clean = run(form, arrays, spec.part_widths)
    a, b = arrays.a.copy(), arrays.b.copy()
    a[0], b[0] = a[0] * 1e4, b[0] * 1e4
    loud = run(form, arrays._replace(a=a, b=b), spec.part_widths)
    others = arrays.slot != 0
    np.testing.assert_array_equal(loud[others], clean[others])
    assert np.isinf(loud[~others]).any()


@pytest.mark.parametrize("ghost", [-1, -7, 5, 2**31 - 1])
def test_padding_rows_change_nothing_whatever_their_slot(ghost):
    spec = small(tokens=8)
    arrays = arrays_of(spec)
    arrays.slot[3:] = ghost
    arrays.x[3:] = np.nan
    out = run("chosen", arrays, spec.part_widths)
    np.testing.assert_array_equal(out[3:], arrays.y[3:])
    want = expected(arrays, spec.part_widths)
    np.testing.assert_allclose(out[:3], want[:3], **TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_base_rows_keep_their_bits_inside_a_larger_program(dtype):
    spec = small(dtype=dtype)
    arrays = arrays_of(spec)
    positional, keywords = call_arguments(arrays, spec.part_widths)
    x, _, a, b = positional
    rng = np.random.default_rng(1)
    kernel = jnp.asarray(rng.standard_normal((24, 21)).astype(arrays.x.dtype))
    bias = jnp.asarray(rng.standard_normal(21).astype(arrays.x.dtype))

    def layer(x, kernel, bias, adapted):
        y = x @ kernel + bias[None, :]
        return lora_delta(x, y, a, b, **keywords) if adapted else y

    call = jax.jit(layer, static_argnums=3)
    plain = np.asarray(call(x, kernel, bias, False))
    mixed = np.asarray(call(x, kernel, bias, True))
    base = arrays.slot < 0
    np.testing.assert_array_equal(mixed[base], plain[base])
    assert (mixed[~base] != plain[~base]).any(axis=1).sum() > 5


@pytest.mark.parametrize("tokens", [7, 24, 31, 70])
def test_a_row_has_the_same_bits_in_every_batch_of_its_size(tokens):
    spec = small(tokens=tokens, distribution="distinct", d_in=100)
    arrays = arrays_of(spec)
    alone = run("chosen", arrays, spec.part_widths)
    rng, compared = np.random.default_rng(0), 0
    for _ in range(3):
        mixed = arrays._replace(slot=rng.integers(-1, 5, tokens).astype(np.int32))
        order = rng.permutation(tokens)
        shuffled = mixed._replace(
            **{k: getattr(mixed, k)[order] for k in ("x", "y", "slot", "weight")}
        )
        out = run("chosen", shuffled, spec.part_widths)
        same = mixed.slot[order] == arrays.slot[order]
        compared += same.sum()
        np.testing.assert_array_equal(out[same], alone[order][same])
    assert compared > 1


def test_the_chosen_blocks_are_powers_of_two_within_their_bounds():
    for tokens in range(1, 5000, 37):
        for slots in (1, 2, 8, 33, 1000):
            loop, batch = loop_block(tokens, slots), batched_block(tokens, slots)
            assert loop & (loop - 1) == 0 == batch & (batch - 1)
            assert 1 <= loop <= 128
            assert 16 <= batch <= 128
    assert [loop_block(t, 8) for t in (1, 16, 128, 512, 8192)] == [1, 4, 16, 64, 128]


def test_flat_is_for_decode_over_few_slots():
    assert flat_fits(16, 8, 16)
    assert flat_fits(32, 16, 16)
    assert not flat_fits(4, 4, 16)  # copies of A take less
    assert not flat_fits(64, 8, 16)  # a row meets B alone
    assert not flat_fits(8, 16, 16)  # most slots have no row
    assert not flat_fits(32, 32, 16)  # A of all slots is large
    assert not flat_fits(16, 2, 64)  # a sum too long to write out


def test_few_is_for_a_handful_of_rows_of_small_rank():
    assert few_fits(1, 16)
    assert few_fits(16, 8)
    assert not few_fits(17, 16)  # rows of one adapter would each copy its A
    assert not few_fits(1, 17)  # a sum too long to write out


def _compiled(spec, form, donate=()):
    arrays = arrays_of(spec)
    positional, keywords = call_arguments(arrays, spec.part_widths)
    statics = {"part_widths": keywords.pop("part_widths")}
    call = functools.partial(FORMS[form], **statics)
    return jax.jit(call, donate_argnums=donate).lower(*positional, **keywords).compile()


@pytest.mark.parametrize("form", ["loop", "flat", "few"])
def test_no_form_for_a_cpu_widens_a_table_to_slice_it(form):
    # All of B, and in a loop all of A, in float32: what a call would cost whatever the
    # batch. Only the product over all slots takes A as it is.
    spec = small(tokens=8, d_in=96, dtype="bfloat16")
    arrays = arrays_of(spec)
    shapes = [arrays.b.shape] if form == "flat" else [arrays.b.shape, arrays.a.shape]
    program = _compiled(spec, form).as_text()
    for shape in shapes:
        wide = "f32[" + ",".join(map(str, shape)) + "]"
        narrow = "bf16" + wide[3:]
        assert narrow in program
        assert wide not in program


def test_the_loop_adds_into_y_in_place():
    spec = small(tokens=2048, d_in=32, part_widths=(2048,))
    compiled = _compiled(spec, "loop", donate=(1,))
    y_bytes = 2048 * 2048 * 4
    assert compiled.memory_analysis().alias_size_in_bytes == y_bytes
    assert compiled.memory_analysis().temp_size_in_bytes < y_bytes / 4


@pytest.mark.parametrize(
    ("rank", "products"), [(0, 0), (8, 1), (16, 1), (17, 2), (256, 16)]
)
def test_a_slot_costs_its_own_rank_in_a_large_bank(rank, products, monkeypatch):
    spec = small(tokens=5, distribution="identical", ranks=(rank,), max_rank=256)
    arrays = arrays_of(spec)
    positional, keywords = call_arguments(arrays, spec.part_widths)
    calls, update = [], xla_cpu_forms._update

    def counted(*arguments):
        jax.debug.callback(lambda: calls.append(1))
        return update(*arguments)

    monkeypatch.setattr(xla_cpu_forms, "_update", counted)
    out = FORMS["loop"](*positional, **keywords)
    jax.effects_barrier()
    np.testing.assert_allclose(
        out, expected(arrays, spec.part_widths), **TOLERANCE["float32"]
    )
    assert len(calls) == products
