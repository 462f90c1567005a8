"""Gradients of grouped_dot: against float64, alone against mixed, and what is zero."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grouped_cases import (
    arrays_of,
    backward_arguments,
    covering_cases,
    expected_gradients,
    forward_arguments,
    local,
    poisoned,
    small,
)
from lora_kernels import grouped_dot
from lora_kernels.grouped_dot import backward, xla_forms

TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Largest error of a gradient relative to the largest gradient of its array."""


def gradients(arrays, implementation=None):
    x, kernel, pairs = forward_arguments(arrays)
    cotangent = jnp.asarray(arrays.g)

    def loss(x, kernel):
        out = grouped_dot(x, kernel, pairs, implementation=implementation)
        return jnp.sum((out * cotangent).astype(jnp.float32))

    found = jax.jit(jax.grad(loss, (0, 1)))(x, kernel)
    return tuple(map(np.asarray, found))


def assert_equal_float64(found, arrays, dtype):
    for got, want, argument in zip(
        found, expected_gradients(arrays), (arrays.x, arrays.kernel), strict=True
    ):
        assert got.dtype == argument.dtype
        error = np.abs(got.astype(np.float64) - want).max(initial=0)
        assert error <= TOLERANCE[dtype] * max(1.0, np.abs(want).max(initial=0))
        assert not got[want == 0].any()


@pytest.mark.parametrize("case", covering_cases(12), ids=lambda case: case.name)
def test_gradients_equal_float64(case):
    arrays = arrays_of(case)
    assert_equal_float64(gradients(arrays), arrays, case.dtype)


def test_the_reference_has_the_gradients_of_xla():
    arrays = arrays_of(small())
    for one, other in zip(
        gradients(arrays, "reference"), gradients(arrays, "xla"), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_on_accelerators_equal_float64(monkeypatch, dtype):
    # The branches for accelerators, run on this machine.
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *, cpu, default: default()
    )
    arrays = arrays_of(small(rows=70, dtype=dtype))
    found = backward.grouped_dot_backward(*backward_arguments(arrays))
    assert_equal_float64(tuple(map(np.asarray, found)), arrays, dtype)


@pytest.mark.parametrize("tile_rows", [1, 5])
def test_kernels_larger_than_a_tile_have_the_same_gradients(monkeypatch, tile_rows):
    arrays = arrays_of(small())
    monkeypatch.setattr(xla_forms, "TILE_BYTES", tile_rows * 21 * 4)
    found = backward.grouped_dot_backward(*backward_arguments(arrays))
    assert_equal_float64(tuple(map(np.asarray, found)), arrays, "float32")


def test_a_mixed_batch_gives_each_group_its_gradient_alone():
    arrays = arrays_of(small(rows=40, spread="zipf"))
    _, mixed = gradients(arrays)
    for group in range(5):
        own = np.where(arrays.group == group, group, -1).astype(np.int32)
        _, alone = gradients(arrays._replace(group=own))
        np.testing.assert_array_equal(mixed[group], alone[group])
        np.testing.assert_array_equal(np.delete(alone, group, axis=0), 0)
        assert np.abs(alone[group]).max() > 0.1


@pytest.mark.parametrize("group", [1, 4], ids=["of-other-pairs", "idle"])
def test_poison_reaches_no_other_gradient(group):
    arrays = arrays_of(small(rows=40, per_row=1))
    arrays = arrays._replace(group=np.where(arrays.group == 4, 3, arrays.group))
    dirty = poisoned(arrays, [group])
    # A cotangent of a pair without a group, or of the poisoned group, is any number.
    g = arrays.g.copy()
    g[(arrays.group == group) | ~local(arrays)] = np.nan
    clean, found = gradients(arrays), _backward(dirty._replace(g=g))
    rows, groups = arrays.group != group, np.arange(5) != group
    np.testing.assert_array_equal(found[0][rows], clean[0][rows])
    np.testing.assert_array_equal(found[1][groups], clean[1][groups])


def _backward(arrays):
    call = jax.jit(backward.grouped_dot_backward)
    return tuple(map(np.asarray, call(*backward_arguments(arrays))))


def test_remat_gives_the_same_gradients():
    arrays = arrays_of(small())
    x, kernel, pairs = forward_arguments(arrays)

    def loss(call, x):
        return jnp.sum(call(x, kernel, pairs) ** 2)

    plain = jax.grad(functools.partial(loss, grouped_dot))(x)
    again = jax.grad(functools.partial(loss, jax.checkpoint(grouped_dot)))(x)
    np.testing.assert_array_equal(plain, again)


def test_batches_under_vmap_equal_batches_in_turn():
    arrays = arrays_of(small())
    x, kernel, pairs = forward_arguments(arrays)
    xs = jnp.stack([x, 2 * x, -x])

    def loss(kernel, x):
        return jnp.sum(grouped_dot(x, kernel, pairs) ** 2)

    together = jax.jit(jax.vmap(lambda x: grouped_dot(x, kernel, pairs)))(xs)
    grads = jax.vmap(jax.grad(loss), in_axes=(None, 0))(kernel, xs)
    for k in range(3):
        want = grouped_dot(xs[k], kernel, pairs)
        np.testing.assert_allclose(together[k], want, atol=2e-5)
        np.testing.assert_allclose(
            grads[k], jax.grad(loss)(kernel, xs[k]), rtol=1e-4, atol=1e-3
        )


def test_forward_mode_is_refused():
    x, kernel, pairs = forward_arguments(arrays_of(small()))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: grouped_dot(x, kernel, pairs), (x,), (x,))


CALLS = {
    "loop": functools.partial(xla_forms.loop, block=8),
    "batched": functools.partial(xla_forms.batched, block=16),
    "loop_transposed": functools.partial(xla_forms.loop_transposed, block=8),
    "batched_transposed": functools.partial(xla_forms.batched_transposed, block=16),
}


@pytest.mark.parametrize("call", [*CALLS, "backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_float32_are_not_left_to_tf32(call, dtype):
    arrays = arrays_of(small(dtype=dtype))
    x, g, kernel, pairs = backward_arguments(arrays)
    if call == "backward":
        lowered = jax.jit(backward.grouped_dot_backward).lower(x, g, kernel, pairs)
    else:
        rows = g if "transposed" in call else x
        lowered = jax.jit(CALLS[call]).lower(rows, kernel, pairs)
    dots = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert dots
    wanted = "[HIGHEST, HIGHEST]" if dtype == "float32" else "[DEFAULT, DEFAULT]"
    assert all(wanted in line for line in dots)
