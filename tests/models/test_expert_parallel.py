"""Experts on two and four devices against the same experts on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from expert_files import EXPERTS, Sizes
from expert_models import build
from lora_jax import LoRAConfig, LRUCacheLoRAModelManager
from lora_jax.errors import ModelError
from lora_jax.models import local_experts, shard_experts
from lora_jax.models.expert_parallel import held_experts

TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}
TOKENS, TOP_K = 12, 2
SIZES = Sizes(8, 12, 10)


def mesh(devices, names=("expert",), shape=None):
    found = jax.devices()[:devices]
    return jax.make_mesh(shape or (devices,), names, devices=found)


def pair(sizes=SIZES, *, gated=True, over=None, devices=2):
    """A model on one device, and the same with its experts spread."""
    single, spread = (build(sizes, TOP_K, gated=gated) for _ in range(2))
    shard_experts(spread, over or mesh(devices))
    return single, spread


def tokens(seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((TOKENS, SIZES.d)), jnp.float32)


def run(model, x, *, jit):
    if not jit:
        return np.asarray(model(x))
    graphdef, state = nnx.split(model)
    step = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    return np.asarray(step(state, x))


CASES = {
    "two devices": {"devices": 2},
    "four devices": {"devices": 4},
    "with biases": {"sizes": Sizes(8, 12, 10, interleaved=True)},
    "without a gate": {"gated": False, "devices": 4},
    "one device": {"devices": 1},
    "beside another axis": {"over": ("data", "expert")},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("jit", [False, True])
def test_spread_experts_give_what_those_of_one_device_give(case, jit):
    values = dict(CASES[case])
    if "over" in values:
        values["over"] = mesh(4, values["over"], (2, 2))
    single, spread = pair(**values)
    x = tokens()
    expected = run(single, x, jit=jit)
    np.testing.assert_allclose(run(spread, x, jit=jit), expected, **TOLERANCE)
    assert np.abs(expected).max() > 0.1


def test_each_device_holds_its_own_experts_and_all_of_the_rest():
    _, spread = pair(Sizes(8, 12, 10, interleaved=True), devices=4)
    block = spread.block
    for linear in (block.experts.gate_up_proj, block.experts.down_proj):
        for variable in (linear.kernel, linear.bias):
            value = variable[...]
            assert value.shape[0] == 8
            shapes = {shard.data.shape for shard in value.addressable_shards}
            assert shapes == {(2, *value.shape[1:])}
            assert len(value.sharding.device_set) == 4
    gate = block.gate.kernel[...]
    assert gate.sharding.is_fully_replicated
    assert len(gate.sharding.device_set) == 4


CHOSEN = {
    "all on the first device": [[0, 1]] * TOKENS,
    "all on the last device": [[7, 6]] * TOKENS,
    "one twice": [[3, 3]] * TOKENS,
    "experts that are nowhere": [[-1, 8], [2, 9], [-5, 7], [100, -100]] * 3,
}


@pytest.mark.parametrize("case", CHOSEN)
def test_a_device_without_a_tokens_experts_adds_nothing(case):
    single, spread = pair(devices=4)
    x, chosen = tokens(), jnp.asarray(CHOSEN[case], jnp.int32)
    weights = jnp.asarray(np.random.default_rng(1).random(chosen.shape), jnp.float32)
    expected = single.block.experts(x, chosen, weights)
    found = spread.block.experts(x, chosen, weights)
    np.testing.assert_allclose(found, expected, **TOLERANCE)
    if case == "experts that are nowhere":
        np.testing.assert_array_equal(found[0], np.zeros(SIZES.d))


def test_gradients_are_those_of_one_device():
    grads = []
    for model in pair(devices=4):
        graphdef, state = nnx.split(model)

        def loss(state, x, graphdef=graphdef):
            return jnp.sum(jnp.sin(nnx.merge(graphdef, state)(x)))

        grads.append(jax.jit(jax.grad(loss, argnums=(0, 1)))(state, tokens()))
    single, spread = (jax.tree.leaves(grad) for grad in grads)
    for expected, found in zip(single, spread, strict=True):
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_what_stands_against_it_is_said_all_at_once():
    model = nnx.List([build(Sizes(6, 4, 4), 1), build(Sizes(9, 4, 4), 1)])
    before = jax.tree.leaves(nnx.state(model))
    with pytest.raises(ModelError, match="cannot be spread") as caught:
        shard_experts(model, mesh(4))
    text = str(caught.value)
    assert f"0.{EXPERTS}: 6 experts are no multiple of the 4 devices" in text
    assert f"1.{EXPERTS}: 9 experts are no multiple of the 4 devices" in text
    after = jax.tree.leaves(nnx.state(model))
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert model[0].block.experts.expert_mesh is None


@pytest.mark.parametrize(
    ("model", "axis", "text"),
    [
        (lambda: build(SIZES, 1), "model", r"no axis 'model', only \('expert',\)"),
        (lambda: nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))]), "expert", "no expert"),
        (lambda: stacked(), "expert", f"{EXPERTS}: stacks several layers"),
        (lambda: wrapped(), "expert", r"down_proj.lora_slots: is no parameter"),
    ],
)
def test_a_model_that_cannot_be_spread_is_refused(model, axis, text):
    with pytest.raises(ModelError, match=text):
        shard_experts(model(), mesh(2), axis)


def stacked():
    model = build(SIZES, 1)
    kernel = model.block.experts.down_proj.kernel
    kernel.set_value(jnp.stack([kernel[...]] * 2))
    return model


def wrapped():
    model = build(SIZES, 1)
    LRUCacheLoRAModelManager(model, LoRAConfig())
    return model


def test_parameters_that_have_lost_their_metadata_are_refused():
    _, spread = pair()
    spread.block.experts.down_proj.kernel.set_metadata(expert_axis=None)
    with pytest.raises(ValueError, match="holds 8 of 8 experts that are spread"):
        spread(tokens())


@pytest.mark.parametrize(
    ("is_local", "expected"),
    [
        ([True], None),
        ([True, True], None),
        ([True, False], range(4)),
        ([False, True, True, False], range(2, 6)),
        ([False, True, False, True], range(2, 8)),
        ([False, False], range(0)),
    ],
)
def test_a_process_holds_the_experts_of_its_devices(is_local, expected):
    assert held_experts(is_local, 8) == expected


def test_a_process_with_every_device_holds_all_experts(monkeypatch):
    single, spread = pair()
    assert local_experts(single) is None
    assert local_experts(spread) is None
    assert local_experts(nnx.List([single, spread])) is None
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert local_experts(spread) == range(0)
    assert local_experts(nnx.List([single, spread])) is None
