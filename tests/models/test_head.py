"""The tied head in both orders of its product, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.models.head import DECODE_ROWS, TiedHead

WIDTH, VOCAB = 24, 50
SHAPES = [(1,), (2,), (16,), (4, 4), (DECODE_ROWS,), (DECODE_ROWS + 1,), (2, 40), (0,)]


def hidden_and_table(shape, dtype="float32"):
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.standard_normal((*shape, WIDTH)), dtype),
        jnp.asarray(rng.standard_normal((VOCAB, WIDTH)), dtype),
    )


def head(hidden, table):
    return TiedHead(WIDTH, VOCAB)(hidden, table)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_products_with_the_table(shape, dtype):
    hidden, table = hidden_and_table(shape, dtype)
    want = np.asarray(hidden, np.float64) @ np.asarray(table, np.float64).T
    tolerance = {"float32": 1e-4, "bfloat16": 0.1}[dtype]
    for call in (head, jax.jit(head)):
        logits = call(hidden, table)
        assert logits.dtype == hidden.dtype
        assert logits.shape == (*shape, VOCAB)
        np.testing.assert_allclose(logits, want, atol=tolerance)


def test_gradients_and_vmap_pass_through_either_order():
    hidden, table = hidden_and_table((3, 4))

    def total(hidden, table):
        return jnp.sum(jnp.sin(head(hidden, table)))

    def plain(hidden, table):
        return jnp.sum(jnp.sin(hidden @ table.T))

    got = jax.grad(total, argnums=(0, 1))(hidden, table)
    want = jax.grad(plain, argnums=(0, 1))(hidden, table)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    mapped = jax.vmap(head, in_axes=(0, None))(hidden, table)
    np.testing.assert_allclose(mapped, hidden @ table.T, atol=1e-4)


def test_a_cpu_reads_the_table_as_it_lies():
    # A transposed copy of the table would cost more than the product.
    hidden, table = hidden_and_table((16,))
    program = jax.jit(head).lower(hidden, table).compile().as_text()
    assert f"f32[{WIDTH},{VOCAB}]" not in program
    assert f"f32[{VOCAB},16]" in program
