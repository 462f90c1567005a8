"""The public op: which implementation runs, what is refused, donation, retracing."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from delta_cases import TOLERANCE, call_arguments, expected, small, with_fields
from lora_kernels import lora_delta, make_routing
from lora_kernels.lora_delta import api, which_implementation
from lora_kernels.lora_delta.specs import arrays_of


@pytest.fixture
def call():
    spec = small()
    arrays = arrays_of(spec)
    positional, keywords = call_arguments(arrays, spec.part_widths)
    return types.SimpleNamespace(
        positional=positional,
        keywords=keywords,
        expected=expected(arrays, spec.part_widths),
    )


@pytest.fixture
def refusing(monkeypatch):
    """Adds two implementations that refuse, one by its import."""
    module = types.ModuleType("refusing")

    def refuse(*_, **__):
        raise NotImplementedError("needs compute capability 9.0")

    module.lora_delta = refuse
    monkeypatch.setitem(__import__("sys").modules, "refusing", module)
    table = {**api.IMPLEMENTATIONS, "new": "refusing", "gone": "no_such_module"}
    monkeypatch.setattr(api, "IMPLEMENTATIONS", types.MappingProxyType(table))


@pytest.mark.parametrize("implementation", ["reference", "xla", ("xla", "reference")])
def test_every_implementation_that_runs_here_equals_float64(call, implementation):
    out = lora_delta(*call.positional, **call.keywords, implementation=implementation)
    np.testing.assert_allclose(out, call.expected, **TOLERANCE["float32"])


def test_the_default_on_a_cpu_is_xla(call):
    choice = which_implementation(*call.positional, **call.keywords)
    assert (choice.name, dict(choice.refusals)) == ("xla", {})


def test_a_refusal_falls_back_to_the_next_and_is_told(call, refusing):
    names = ("new", "gone", "xla")
    choice = which_implementation(
        *call.positional, **call.keywords, implementation=names
    )
    assert choice.name == "xla"
    assert dict(choice.refusals) == {
        "new": "needs compute capability 9.0",
        "gone": "No module named 'no_such_module'",
    }
    out = lora_delta(*call.positional, **call.keywords, implementation=names)
    np.testing.assert_allclose(out, call.expected, **TOLERANCE["float32"])


def test_all_refusals_are_reported_together(call, refusing):
    with pytest.raises(NotImplementedError, match=r"(?s)new: needs.*gone: No module"):
        lora_delta(*call.positional, **call.keywords, implementation=("new", "gone"))


@pytest.mark.parametrize("implementation", ["cuda", ("xla", "cuda"), ()])
def test_unknown_names_are_refused_with_the_known_ones(call, implementation):
    with pytest.raises(ValueError, match=r"unknown implementation .*known: .*xla"):
        lora_delta(*call.positional, **call.keywords, implementation=implementation)


def test_which_implementation_needs_only_shapes(call):
    positional, keywords = jax.eval_shape(
        lambda: (call.positional, {k: call.keywords[k] for k in ("scale", "rank")})
    )
    routing = jax.eval_shape(lambda: call.keywords["routing"])
    widths = call.keywords["part_widths"]
    choice = which_implementation(
        *positional, **keywords, routing=routing, part_widths=widths
    )
    assert choice.name == "xla"


FITTING = make_routing(jnp.zeros((23,), jnp.int32), 5)

# What is changed -> what the error says. All faults are told at once.
FAULTS = {
    "parts": ({"part_widths": (10, 11)}, r"a is .*expected \(5, 2, 8, 24\)"),
    "columns": ({"part_widths": (10, 4, 8)}, r"y is .*\(23, 22\); b is .*\(5, 8, 22\)"),
    "slots": (
        {"routing": make_routing(jnp.zeros((23,), jnp.int32), 4)},
        r"routing slots is \(4,\), expected \(5,\)",
    ),
    "tokens": (
        {"routing": make_routing(jnp.zeros((3,), jnp.int32), 5)},
        r"routing.slot is \(3,\), expected \(23,\)",
    ),
    "weight": (
        {"routing": with_fields(FITTING, weight=jnp.ones(3), order=jnp.ones(23))},
        r"routing.weight is float32 \(3,\), expected .*; routing.order is float32",
    ),
    "one weight": (
        {"routing": with_fields(FITTING, weight=jnp.ones(1))},
        r"routing.weight is float32 \(1,\), expected floats \(23,\)",
    ),
    "work": (
        {"routing": with_fields(FITTING, work_slot=FITTING.work_slot[:2])},
        r"routing.work_slot is int32 \(2,\), expected int32 \(6,\)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("function", [lora_delta, which_implementation])
def test_shapes_that_disagree_are_named(call, fault, function):
    change, text = FAULTS[fault]
    with pytest.raises(ValueError, match=text):
        function(*call.positional, **{**call.keywords, **change})


def test_axes_and_dtypes_are_checked_without_the_type_hook(call):
    x, y, a, b = call.positional
    check = functools.partial(
        api.check_arguments, **{k: v for k, v in call.keywords.items()}
    )
    with pytest.raises(ValueError, match=r"expected x \(tokens, d_in\)"):
        check(x[0], y, a, b)
    with pytest.raises(ValueError, match=r"x is int32, expected a floating dtype"):
        check(x.astype(jnp.int32), y, a, b)
    scale = {"scale": jnp.ones((5, 1))}
    with pytest.raises(ValueError, match=r"scale is \(5, 1\), expected \(5, 3\)"):
        api.check_arguments(x, y, a, b, **{**call.keywords, **scale})
    scale = {"scale": jnp.ones((5, 3), jnp.int32)}
    with pytest.raises(ValueError, match=r"scale is int32, expected a floating dtype"):
        api.check_arguments(x, y, a, b, **{**call.keywords, **scale})
    rank = call.keywords["rank"].astype(jnp.float32)
    with pytest.raises(ValueError, match=r"rank is float32, expected int32"):
        api.check_arguments(x, y, a, b, **{**call.keywords, "rank": rank})


def test_nothing_retraces_when_adapters_ranks_or_mixes_change():
    traces = []

    @jax.jit
    def step(slot, arrays):
        traces.append(1)
        routing = make_routing(slot, 5)
        x, y, a, b, scale, rank = arrays
        return lora_delta(
            x, y, a, b, scale=scale, rank=rank, routing=routing, part_widths=(10, 4, 7)
        )

    for ranks in [(8,), (1, 0, 3), (0,)]:
        for distribution in ["identical", "distinct", "all_base"]:
            spec = small(ranks=ranks, max_rank=8, distribution=distribution)
            arrays = arrays_of(spec)
            out = step(jnp.asarray(arrays.slot), tuple(map(jnp.asarray, arrays[:6])))
            want = expected(
                arrays._replace(weight=np.ones(23, np.float32)), spec.part_widths
            )
            np.testing.assert_allclose(out, want, **TOLERANCE["float32"])
    assert len(traces) == 1


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_donated_output_is_reused(call, implementation):
    x, y, a, b = call.positional
    step = jax.jit(
        lambda x, y: lora_delta(
            x, y, a, b, **call.keywords, implementation=implementation
        ),
        donate_argnums=1,
    )
    out = step(x, y)
    assert y.is_deleted()
    np.testing.assert_allclose(out, call.expected, **TOLERANCE["float32"])


def test_numpy_arrays_and_eager_calls_are_fine(call):
    eager = lora_delta(*call.positional, **call.keywords)
    jitted = jax.jit(lambda x, y, a, b: lora_delta(x, y, a, b, **call.keywords))
    np.testing.assert_array_equal(eager, jitted(*call.positional))


def test_mixed_dtypes_keep_the_dtype_of_y(call):
    x, y, a, b = call.positional
    out = lora_delta(
        x.astype(jnp.bfloat16), y, a.astype(jnp.float16), b.astype(jnp.bfloat16),
        **call.keywords,
    )  # fmt: skip
    assert out.dtype == y.dtype
    np.testing.assert_allclose(out, call.expected, **TOLERANCE["bfloat16"])
