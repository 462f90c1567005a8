"""lora_experts: every form equals dense experts in float64; what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from delta_cases import TOLERANCE, with_fields
from expert_cases import (
    CASES,
    DOWN,
    backend_arguments,
    expected_experts,
    expert_arguments,
    expert_arrays,
    small,
    untouched,
)
from lora_kernels import lora_experts, make_routing, pair_routing
from lora_kernels.lora_delta import api, xla_cpu_forms, xla_forms
from lora_kernels.lora_delta.site import Site
from lora_kernels.lora_experts import which_implementation
from lora_kernels.lora_experts.checks import check_arguments

FORMS = {
    "loop": functools.partial(xla_cpu_forms.loop, block=4),
    "flat": xla_cpu_forms.flat,
    "few": xla_cpu_forms.few,
    "gather": xla_forms.gather,
    "batched": functools.partial(xla_forms.batched, block=16),
}


def run(arrays, widths, **options):
    positional, keywords = expert_arguments(arrays, widths)
    return np.asarray(lora_experts(*positional, **keywords, **options))


def run_form(form, arrays, widths):
    (x, y, a, b), keywords = backend_arguments(arrays, widths)
    site = Site(a, b, keywords["scale"], keywords["rank"], widths)
    return np.asarray(FORMS[form](x, y, site, keywords["routing"]))


def assert_equals_float64(out, arrays, widths, dtype="float32"):
    want = expected_experts(arrays, widths)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, **TOLERANCE[dtype])
    base = untouched(arrays)
    np.testing.assert_array_equal(out[base], arrays.y[base])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_equals_dense_experts_in_float64(case, implementation):
    arrays = expert_arrays(case)
    out = run(arrays, case.part_widths, implementation=implementation)
    assert_equals_float64(out, arrays, case.part_widths)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("changes", [{}, DOWN], ids=["shared-rows", "own-rows"])
def test_forms_for_few_and_for_many_rows_agree(form, changes):
    case = small(tokens=30, **changes)
    arrays = expert_arrays(case)
    out = run_form(form, arrays, case.part_widths)
    assert_equals_float64(out, arrays, case.part_widths)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("changes", [{}, DOWN], ids=["shared-rows", "own-rows"])
def test_every_dtype_equals_float64(dtype, changes):
    case = small(dtype=dtype, **changes)
    arrays = expert_arrays(case)
    out = run(arrays, case.part_widths)
    assert out.dtype == arrays.y.dtype
    assert_equals_float64(out, arrays, case.part_widths, dtype)


def test_float16_is_not_rounded_to_bfloat16_on_the_way():
    case = small(dtype="float16", ranks=(8,))
    arrays = expert_arrays(case)
    arrays = arrays._replace(y=np.zeros_like(arrays.y))
    out = run(arrays, case.part_widths).astype(np.float64)
    want = expected_experts(arrays, case.part_widths)
    # Of half the step of float16, 2**-11, and an eighth of that of bfloat16, 2**-8.
    np.testing.assert_allclose(out, want, rtol=2.0**-11, atol=2e-5)


def poisoned(arrays, widths, *, slot, expert):
    """NaN in rank tails, in base rows, and in one adapter and in one expert of all."""
    a, b, x = arrays.a.copy(), arrays.b.copy(), arrays.x.copy()
    scale, weight = arrays.scale.copy(), arrays.weight.copy()
    row = np.arange(a.shape[3])
    a[row >= arrays.rank[..., None]] = np.nan
    rank_of_column = np.repeat(arrays.rank, widths, axis=2)
    b[row[None, None, :, None] >= rank_of_column[:, :, None, :]] = np.nan
    scale[arrays.rank == 0] = np.nan
    for array in (a, b, scale):
        array[slot], array[:, expert] = np.nan, np.nan
    per_token = len(x) // len(arrays.slot)
    x[np.repeat(arrays.slot < 0, per_token)] = np.nan
    weight[arrays.slot < 0] = np.nan
    return arrays._replace(a=a, b=b, x=x, scale=scale, weight=weight)


@pytest.mark.parametrize("form", [*FORMS, "reference", "xla"])
@pytest.mark.parametrize("changes", [{}, DOWN], ids=["shared-rows", "own-rows"])
def test_poison_never_reaches_a_pair_of_another_adapter_or_expert(form, changes):
    case = small(tokens=30, ranks=(8, 0, 3), max_rank=9, **changes)
    arrays = expert_arrays(case)
    dirty = poisoned(arrays, case.part_widths, slot=1, expert=2)

    def call(arrays):
        if form in FORMS:
            return run_form(form, arrays, case.part_widths)
        return run(arrays, case.part_widths, implementation=form)

    out = call(dirty)
    slot = np.repeat(arrays.slot, case.chosen)
    hit = ((slot == 1) | (arrays.expert == 2)) & ~untouched(arrays)
    np.testing.assert_array_equal(out[~hit], call(arrays)[~hit])
    assert 0 < hit.sum() < len(hit)
    adapted = arrays.virtual.rank[arrays.virtual.slot].all(axis=1)
    assert np.isnan(out[hit & adapted]).all()


def test_one_program_serves_every_mix():
    case = small(distribution="distinct", max_rank=8)
    traces = []

    @jax.jit
    def step(arguments, slot, expert):
        traces.append(1)
        x, y, a, b, scale, rank = arguments
        routing = pair_routing(make_routing(slot, case.slots), expert, case.experts)
        return lora_experts(
            x, y, a, b, scale=scale, rank=rank, routing=routing,
            part_widths=case.part_widths,
        )  # fmt: skip

    for ranks in [(8,), (1, 0, 3), (0,)]:
        for distribution in ["identical", "distinct", "all_base"]:
            mix = small(ranks=ranks, max_rank=8, distribution=distribution)
            arrays = expert_arrays(mix)
            arrays = arrays._replace(weight=np.ones_like(arrays.weight))
            out = step(arrays[:6], arrays.slot, arrays.expert)
            assert_equals_float64(out, arrays, mix.part_widths)
    assert len(traces) == 1


def test_ten_times_the_slots_take_no_more_memory_for_the_same_batch():
    def temporaries(slots):
        case = small(slots=slots, d_in=256, part_widths=(128, 128))
        positional, keywords = expert_arguments(expert_arrays(case), case.part_widths)
        call = functools.partial(lora_experts, part_widths=keywords.pop("part_widths"))
        compiled = jax.jit(call).lower(*positional, **keywords).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    virtual_slots = 27 * 5
    grown = temporaries(30) - temporaries(3)
    assert grown <= 256 * virtual_slots  # index arrays; A of one slot has 16 KiB


def test_a_donated_output_is_reused():
    case = small()
    arrays = expert_arrays(case)
    (x, y, a, b), keywords = expert_arguments(arrays, case.part_widths)
    step = jax.jit(lambda y: lora_experts(x, y, a, b, **keywords), donate_argnums=0)
    out = step(y)
    assert y.is_deleted()
    assert_equals_float64(np.asarray(out), arrays, case.part_widths)


def test_which_implementation_needs_only_shapes():
    positional, keywords = expert_arguments(expert_arrays(small()), (10, 14))
    shapes = jax.eval_shape(
        lambda: (positional, {k: keywords[k] for k in ("scale", "rank", "routing")})
    )
    choice = which_implementation(
        *shapes[0], **shapes[1], part_widths=(10, 14), implementation=("triton", "xla")
    )
    assert choice.name == "xla"
    assert set(choice.refusals) == {"triton"}


@pytest.mark.parametrize("implementation", ["cuda", ()])
def test_unknown_names_are_refused_by_this_op(implementation):
    positional, keywords = expert_arguments(expert_arrays(small()), (10, 14))
    with pytest.raises(ValueError, match="lora_experts: unknown implementation"):
        lora_experts(*positional, **keywords, implementation=implementation)


def test_implementations_are_those_of_lora_delta(monkeypatch):
    positional, keywords = expert_arguments(expert_arrays(small()), (10, 14))
    monkeypatch.setattr(api, "DEFAULT_ORDER", {"cpu": ("reference",)})
    assert which_implementation(*positional, **keywords).name == "reference"


FITTING = make_routing(jnp.zeros((39,), jnp.int32), 15)

FAULTS = {
    "parts": ({"part_widths": (24,)}, r"a is .*expected \(3, 5, 1, 8, 24\)"),
    "columns": (
        {"part_widths": (10, 15)},
        r"y is .*\(39, 25\); b is .*8, 25\)",
    ),
    "slots": (
        {"routing": make_routing(jnp.zeros((39,), jnp.int32), 3)},
        r"routing slots is \(3,\), expected \(15,\)",
    ),
    "pairs": (
        {"routing": make_routing(jnp.zeros((13,), jnp.int32), 15)},
        r"routing.slot is \(13,\), expected \(39,\)",
    ),
    "weight": (
        {"routing": with_fields(FITTING, weight=jnp.ones(1), order=jnp.ones(39))},
        r"routing.weight is float32 \(1,\), expected .*; routing.order is float32",
    ),
    "scale": ({"scale": jnp.ones((3, 5, 1))}, r"scale is .*expected \(3, 5, 2\)"),
    "rank": ({"rank": jnp.ones((3, 5, 2))}, r"rank is float32, expected int32"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_shapes_that_disagree_are_named(fault):
    # Past the run-time type check of the public functions, which names them too.
    positional, keywords = expert_arguments(expert_arrays(small()), (10, 14))
    change, text = FAULTS[fault]
    with pytest.raises(ValueError, match=text):
        check_arguments(*positional, **{**keywords, **change})


def test_pairs_must_be_a_multiple_of_the_rows_of_x():
    (x, y, a, b), keywords = expert_arguments(expert_arrays(small()), (10, 14))
    for rows in (x[:0], x[:12]):
        with pytest.raises(ValueError, match=r"39 pairs, expected a multiple of x's"):
            lora_experts(rows, y, a, b, **keywords)
    with pytest.raises(ValueError, match=r"expected x \(rows, d_in\)"):
        check_arguments(x, y, a[0], b, **keywords)
