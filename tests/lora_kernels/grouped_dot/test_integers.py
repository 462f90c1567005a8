"""Kernels of int8: products against float64, gradients of x, and what is widened."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grouped_cases import arrays_of, expected, expected_gradients, small
from grouped_cases import forward_arguments as arguments
from lora_kernels import grouped_dot, make_routing
from lora_kernels.grouped_dot import api, xla_forms

RELATIVE = {"float32": 1e-6, "bfloat16": 2.0**-8}
"""Error of an output by the largest one, by dtype of x."""

FORMS = {
    "reference": functools.partial(grouped_dot, implementation="reference"),
    "xla": functools.partial(grouped_dot, implementation="xla"),
    "batched": functools.partial(xla_forms.batched, block=16),
}


def with_integers(**changes):
    """Returns arrays whose kernel holds every int8, the most extreme ones too."""
    arrays = arrays_of(small(**changes))
    shape = arrays.kernel.shape
    kernel = np.random.default_rng(5).integers(-128, 128, shape, np.int8)
    kernel[0, 0] = -128
    return arrays._replace(kernel=kernel)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("form", FORMS)
def test_products_equal_float64(form, dtype):
    arrays = with_integers(dtype=dtype)
    found = np.asarray(jax.jit(FORMS[form])(*arguments(arrays)), np.float64)
    want = expected(arrays)
    assert np.abs(want).max() > 100
    limit = RELATIVE[dtype] * np.abs(want).max()
    np.testing.assert_allclose(found, want, atol=limit, rtol=0)


def test_x_has_a_gradient_and_the_kernel_has_none():
    arrays = with_integers()
    x, kernel, pairs = arguments(arrays)

    def loss(x, kernel):
        return jnp.sum(grouped_dot(x, kernel, pairs) * arrays.g)

    dx, dkernel = jax.jit(jax.grad(loss, (0, 1), allow_int=True))(x, kernel)
    want, _ = expected_gradients(arrays)
    np.testing.assert_allclose(dx, want, rtol=0, atol=1e-6 * np.abs(want).max())
    assert dkernel.dtype == jax.dtypes.float0


def test_only_tiles_of_the_kernel_are_widened():
    groups, d_in, d_out = 64, 512, 512
    x = jax.ShapeDtypeStruct((4, d_in), jnp.float32)
    kernel = jax.ShapeDtypeStruct((groups, d_in, d_out), jnp.int8)

    def product(x, kernel, group):
        return grouped_dot(x, kernel, make_routing(group, groups))

    group = jax.ShapeDtypeStruct((8,), jnp.int32)
    compiled = jax.jit(product).lower(x, kernel, group).compile()
    one_kernel = 4 * d_in * d_out
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * one_kernel


def test_triton_leaves_them_to_xla(monkeypatch):
    monkeypatch.setattr(api, "DEFAULT_ORDER", {"cpu": ("triton", "xla")})
    choice = api.which_implementation(*arguments(with_integers()))
    assert choice.name == "xla"
