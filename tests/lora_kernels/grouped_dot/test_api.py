"""The public op: which implementation runs, what is refused, empty calls, retracing."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from delta_cases import with_fields
from grouped_cases import TOLERANCE, arrays_of, expected, forward_arguments, small
from lora_kernels import grouped_dot, make_routing
from lora_kernels.grouped_dot import api, which_implementation


@pytest.fixture
def arrays():
    return arrays_of(small())


@pytest.fixture
def refusing(monkeypatch):
    """Adds two implementations that refuse, one by its import."""
    module = types.ModuleType("refusing")

    def refuse(*_):
        raise NotImplementedError("needs compute capability 9.0")

    module.grouped_dot = refuse
    monkeypatch.setitem(__import__("sys").modules, "refusing", module)
    table = {**api.IMPLEMENTATIONS, "new": "refusing", "gone": "no_such_module"}
    monkeypatch.setattr(api, "IMPLEMENTATIONS", types.MappingProxyType(table))


@pytest.mark.parametrize("implementation", ["reference", "xla", ("xla", "reference")])
def test_every_implementation_that_runs_here_equals_float64(arrays, implementation):
    out = grouped_dot(*forward_arguments(arrays), implementation=implementation)
    np.testing.assert_allclose(out, expected(arrays), **TOLERANCE["float32"])


def test_the_default_on_a_cpu_is_xla(arrays):
    choice = which_implementation(*forward_arguments(arrays))
    assert (choice.name, dict(choice.refusals)) == ("xla", {})


def test_a_refusal_falls_back_to_the_next_and_is_told(arrays, refusing):
    names = ("new", "gone", "xla")
    choice = which_implementation(*forward_arguments(arrays), implementation=names)
    assert choice.name == "xla"
    assert dict(choice.refusals) == {
        "new": "needs compute capability 9.0",
        "gone": "No module named 'no_such_module'",
    }
    out = grouped_dot(*forward_arguments(arrays), implementation=names)
    np.testing.assert_allclose(out, expected(arrays), **TOLERANCE["float32"])


def test_all_refusals_are_reported_together(arrays, refusing):
    with pytest.raises(NotImplementedError, match=r"(?s)new: needs.*gone: No module"):
        grouped_dot(*forward_arguments(arrays), implementation=("new", "gone"))


def test_an_unknown_name_is_refused(arrays):
    with pytest.raises(ValueError, match="grouped_dot: unknown implementation cuda"):
        grouped_dot(*forward_arguments(arrays), implementation="cuda")


def test_all_faults_are_told_at_once():
    x, kernel = jnp.zeros((4, 3)), jnp.zeros((2, 5, 6), jnp.int32)
    pairs = make_routing(jnp.zeros(7, jnp.int32), 3)
    with pytest.raises(ValueError, match="grouped_dot: x") as error:
        api.check_arguments(x, kernel, pairs)
    for fault in (
        r"kernel is (2, 5, 6), expected (groups, 3, d_out)",
        "pairs has 3 groups, expected 2",
        "pairs has 7 rows, expected a multiple of x's 4",
        "kernel is int32, expected a floating dtype or int8",
    ):
        assert fault in str(error.value)


def test_a_routing_made_by_hand_is_checked():
    pairs = make_routing(jnp.zeros(8, jnp.int32), 3)
    pairs = with_fields(pairs, weight=jnp.ones(3), position=jnp.zeros(8))
    with pytest.raises(
        ValueError, match=r"pairs.weight is .*3.*; pairs.position is fl"
    ):
        api.check_arguments(jnp.zeros((4, 5)), jnp.zeros((3, 5, 6)), pairs)


def test_pairs_of_no_rows_are_refused():
    pairs = make_routing(jnp.zeros(2, jnp.int32), 3)
    with pytest.raises(ValueError, match="pairs has 2 rows, expected a multiple of"):
        api.check_arguments(jnp.zeros((0, 5)), jnp.zeros((3, 5, 6)), pairs)


def test_wrong_numbers_of_axes_are_refused():
    pairs = make_routing(jnp.zeros(2, jnp.int32), 3)
    with pytest.raises(ValueError, match=r"kernel \(groups, d_in, d_out\); found"):
        api.check_arguments(jnp.zeros((2, 5)), jnp.zeros((5, 6)), pairs)


@pytest.mark.parametrize(
    "sizes",
    [{"rows": 0}, {"per_row": 0}, {"d_in": 0}, {"d_out": 0}],
    ids=lambda sizes: "-".join(sizes),
)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_an_axis_of_length_0_gives_zeros(sizes, implementation):
    case = small(**sizes)
    x, kernel, pairs = forward_arguments(arrays_of(case))

    def total(x, kernel):
        return grouped_dot(x, kernel, pairs, implementation=implementation).sum()

    out = grouped_dot(x, kernel, pairs, implementation=implementation)
    assert out.shape == (case.rows * case.per_row, case.d_out)
    assert not out.any()
    for gradient in jax.grad(total, (0, 1))(x, kernel):
        assert not gradient.any()


def test_other_groups_do_not_retrace():
    arrays = arrays_of(small())
    traces = []

    @jax.jit
    def step(group, x, kernel):
        traces.append(1)
        return grouped_dot(x, kernel, make_routing(group, 5))

    for spread in ("uniform", "one", "half_remote", "all_remote"):
        group = arrays_of(small(spread=spread)).group
        out = step(group, arrays.x, arrays.kernel)
        want = expected(arrays._replace(group=group))
        np.testing.assert_allclose(out, want, **TOLERANCE["float32"])
    assert len(traces) == 1
    assert step._cache_size() == 1


def test_eager_and_jitted_calls_are_equal(arrays):
    x, kernel, pairs = forward_arguments(arrays)
    jitted = jax.jit(lambda x, kernel: grouped_dot(x, kernel, pairs))
    np.testing.assert_array_equal(grouped_dot(x, kernel, pairs), jitted(x, kernel))


def test_the_weights_of_the_pairs_are_not_used(arrays):
    x, kernel, pairs = forward_arguments(arrays)
    weighted = make_routing(pairs.slot, 5, weight=jnp.full(pairs.slot.shape, 7.0))
    np.testing.assert_array_equal(
        grouped_dot(x, kernel, weighted), grouped_dot(x, kernel, pairs)
    )
