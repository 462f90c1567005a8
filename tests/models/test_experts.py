"""Experts against a loop over pairs in float64, and against dense gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax.models.experts import ExpertLinear, Experts
from lora_kernels import make_routing

TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}
"""Of outputs of order one, relative to the largest."""

CASES = {
    "four experts, one chosen": {"experts": 4, "k": 1},
    "four experts, all chosen": {"experts": 4, "k": 4},
    "eight experts, two chosen": {"experts": 8, "k": 2},
    "sixty-four experts, eight chosen": {"experts": 64, "k": 8},
    "one token": {"experts": 8, "k": 2, "tokens": 1},
    "square": {"experts": 8, "k": 3, "width": 16},
    "with biases": {"experts": 8, "k": 2, "use_bias": True},
    "clamped": {"experts": 8, "k": 2, "activation": "swiglu_oai", "use_bias": True},
    "gelu": {"experts": 8, "k": 2, "activation": "gelu_pytorch_tanh"},
    "without a gate": {"experts": 8, "k": 2, "gated": False, "activation": "relu2"},
}


def make(
    *,
    experts: int,
    width: int = 24,
    d: int = 16,
    gated: bool = True,
    activation: str = "silu",
    use_bias: bool = False,
    dtype: str = "float32",
    **_: int,
) -> Experts:
    """Returns random experts whose biases show."""
    model = Experts(
        experts,
        d,
        width,
        gated=gated,
        activation=activation,
        use_bias=use_bias,
        interleaved=False,
        stored_in_out=False,
        dtype=dtype,
        rngs=nnx.Rngs(0),
    )
    random = np.random.default_rng(0)
    # Wide enough that the clamped activation meets its bounds.
    return jax.tree.map(
        lambda x: jnp.asarray(random.normal(0, 1.5, x.shape), x.dtype), model
    )


def inputs(*, experts: int, k: int, tokens: int = 11, d: int = 16, **_: object):
    """Returns tokens, k different experts for each, and weights."""
    random = np.random.default_rng(1)
    x = random.normal(0, 1, (tokens, d))
    chosen = np.stack([random.permutation(experts)[:k] for _ in range(tokens)])
    weights = random.uniform(0.1, 1, (tokens, k))
    return (
        jnp.asarray(x, jnp.float32),
        jnp.asarray(chosen, jnp.int32),
        jnp.asarray(weights, jnp.float32),
    )


def values(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def linear(layer: ExpertLinear, expert: int, x: np.ndarray) -> np.ndarray:
    y = x @ values(layer.kernel)[expert]
    return y if layer.bias is None else y + values(layer.bias)[expert]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def activated(model: Experts, expert: int, x: np.ndarray) -> np.ndarray:
    """Returns what goes into `down_proj`, written out for each kind."""
    if not model.gated:
        return np.maximum(linear(model.up_proj, expert, x), 0) ** 2
    gate, up = np.split(linear(model.gate_up_proj, expert, x), 2)
    if model.activation == "swiglu_oai":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return (up + 1) * gate * sigmoid(1.702 * gate)
    if model.activation == "gelu_pytorch_tanh":
        return gelu_tanh(gate) * up
    return gate * sigmoid(gate) * up


def dense_loop(model: Experts, x, chosen, weights) -> np.ndarray:
    """Returns the sum of the chosen experts of each token, in float64."""
    out = np.zeros(x.shape)
    for token, row in enumerate(np.asarray(x, np.float64)):
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            if 0 <= expert < model.num_experts:
                hidden = activated(model, int(expert), row)
                out[token] += float(weight) * linear(
                    model.down_proj, int(expert), hidden
                )
    return out


def close(found, expected, dtype: str) -> None:
    bound = TOLERANCE[dtype] * np.abs(expected).max()
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=0, atol=bound
    )


run = jax.jit(lambda model, *inputs: model(*inputs))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_output_equals_a_loop_over_experts(case, dtype):
    model = make(**CASES[case], dtype=dtype)
    x, chosen, weights = inputs(**CASES[case])
    x = x.astype(dtype)
    found = run(model, x, chosen, weights)
    assert found.dtype == jnp.dtype(dtype)
    close(found, dense_loop(model, x, chosen, weights), dtype)


def test_a_pair_of_no_expert_adds_nothing():
    model = make(experts=4, use_bias=True)
    x, chosen, weights = inputs(experts=4, k=2)
    chosen = chosen.at[0].set(jnp.array([-1, 4])).at[1, 0].set(-1)
    found = run(model, x, chosen, weights)
    np.testing.assert_array_equal(found[0], 0)
    close(found, dense_loop(model, x, chosen, weights), "float32")


def test_a_token_is_the_same_among_any_others():
    model = make(experts=8)
    x, chosen, weights = inputs(experts=8, k=2)
    others = chosen.at[1:].set((chosen[1:] + 3) % 8)
    np.testing.assert_array_equal(
        run(model, x, chosen, weights)[0], run(model, x, others, weights)[0]
    )


def test_weights_of_experts_that_none_chose_reach_nobody():
    model = make(experts=8, use_bias=True)
    x, chosen, weights = inputs(experts=8, k=2)
    chosen = chosen % 4
    expected = np.asarray(run(model, x, chosen, weights))
    for layer in (model.gate_up_proj, model.down_proj):
        for parameter in (layer.kernel, layer.bias):
            parameter.set_value(parameter[...].at[4:].set(jnp.nan))
    np.testing.assert_array_equal(run(model, x, chosen, weights), expected)


def test_linear_reads_a_row_for_each_pair_or_for_k_pairs():
    layer = make(experts=4, use_bias=True).gate_up_proj
    x, chosen, _ = inputs(experts=4, k=3)
    pairs = make_routing(chosen.reshape(-1), 4)
    shared = layer(x, pairs)
    own = layer(jnp.repeat(x, 3, axis=0), pairs)
    np.testing.assert_array_equal(shared, own)
    expected = [
        linear(layer, int(expert), np.asarray(x, np.float64)[pair // 3])
        for pair, expert in enumerate(chosen.reshape(-1))
    ]
    close(shared, np.stack(expected), "float32")


@pytest.mark.parametrize("case", ["eight experts, two chosen", "clamped"])
def test_gradients_equal_those_of_every_expert_for_every_token(case):
    model = make(**CASES[case])
    x, chosen, weights = inputs(**CASES[case])
    target = jnp.asarray(np.random.default_rng(2).normal(size=x.shape), jnp.float32)
    graphdef, state = nnx.split(model)

    def loss(state, x, weights):
        return jnp.sum(nnx.merge(graphdef, state)(x, chosen, weights) * target)

    def dense_loss(state, x, weights):
        dense = nnx.merge(graphdef, state)
        total = jnp.zeros_like(x)
        for expert in range(dense.num_experts):
            share = jnp.sum(jnp.where(chosen == expert, weights, 0), axis=1)
            total += dense_expert(dense, expert, x) * share[:, None]
        return jnp.sum(total * target)

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(state, x, weights)
    expected = jax.jit(jax.grad(dense_loss, argnums=(0, 1, 2)))(state, x, weights)
    for got, wanted in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert np.abs(wanted).max() > 0
        close(got, np.asarray(wanted, np.float64), "float32")


def dense_expert(model: Experts, expert: int, x: jax.Array) -> jax.Array:
    """Returns one expert's output for all tokens, by plain products."""

    def product(layer: ExpertLinear, x: jax.Array) -> jax.Array:
        y = jnp.dot(x, layer.kernel[...][expert])
        return y if layer.bias is None else y + layer.bias[...][expert][None]

    gate, up = jnp.split(product(model.gate_up_proj, x), 2, axis=-1)
    if model.activation == "swiglu_oai":
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        hidden = (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
    else:
        hidden = jax.nn.silu(gate) * up
    return product(model.down_proj, hidden)


def test_another_choice_of_experts_compiles_nothing():
    model = make(experts=8)
    x, chosen, weights = inputs(experts=8, k=2)
    step = jax.jit(lambda model, *inputs: model(*inputs))
    for other in (chosen, (chosen + 1) % 8, jnp.zeros_like(chosen), -chosen):
        step(model, x, other, weights)
    assert step._cache_size() == 1


def test_attributes_say_how_a_checkpoint_stores_the_experts():
    gated, plain = make(experts=4), make(experts=4, gated=False, activation="relu2")
    paths = {
        ".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(gated))
    }
    assert paths == {"gate_up_proj.kernel", "down_proj.kernel"}
    assert gated.gate_up_proj.kernel.shape == (4, 16, 48)
    assert gated.gate_up_proj.parts == (("gate_proj", 24), ("up_proj", 24))
    assert gated.gate_up_proj.part_widths == (24, 24)
    assert gated.down_proj.kernel.shape == (4, 24, 16)
    assert plain.up_proj.parts == (("up_proj", 24),)
    assert plain.up_proj.kernel.shape == (4, 16, 24)
