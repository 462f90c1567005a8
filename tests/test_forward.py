"""The pure forward: equal to the module's own call, independent of what comes after."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from helpers import TOLERANCE, Toy, expected_rows, inputs, make_adapter
from lora_jax.bank import empty_bank, stage, write
from lora_jax.config import LoRAConfig
from lora_jax.forward import forward, install, merge, split
from lora_jax.layers import LoRARouting, LoRASlots, wrap
from lora_jax.packing import pack
from lora_jax.routing import routing_from_slots

FLOAT32 = np.dtype("float32")
SLOTS = 2


def _setting():
    model = Toy()
    sites = wrap(model, LoRAConfig(max_lora_rank=8))
    bank = empty_bank(sites, SLOTS, FLOAT32)
    return model, sites, bank


def _with(bank, sites, slot, adapter):
    return write(bank, slot, stage(bank, pack(adapter, sites, FLOAT32)))


def test_forward_in_jit_equals_merged_weights_without_recompiling():
    model, sites, bank = _setting()
    graphdef, weights = split(model)
    # A function of its own: newer JAX shares a function's programs among its jits.
    step = jax.jit(lambda *arguments: forward(*arguments), static_argnums=0)
    x = inputs(4)
    adapters = {
        1: make_adapter(1, 4),
        2: make_adapter(2, 8, modules=["blocks.0.q_proj"]),
    }
    for slot_of, rows in [({1: 0, 2: 1}, [1, 0, 2, 1]), ({1: 1, 2: 0}, [2, 2, 0, 1])]:
        for adapter_id, slot in slot_of.items():
            bank = _with(bank, sites, slot, adapters[adapter_id])
        routing = routing_from_slots(
            jnp.asarray([slot_of.get(row, -1) for row in rows], jnp.int32), SLOTS
        )
        expected = expected_rows(Toy(), [adapters.get(row) for row in rows], x)
        got = step(graphdef, weights, bank, routing, x)
        np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=0)
    assert step._cache_size() == 1


def test_no_routing_is_the_base_model_bit_for_bit():
    model, _, bank = _setting()
    graphdef, weights = split(model)
    x = inputs(3)
    got = forward(graphdef, weights, bank, {}, x)
    np.testing.assert_array_equal(got, Toy()(x))


def test_weights_hold_no_slots_and_the_model_keeps_its_own():
    model, sites, bank = _setting()
    bank = _with(bank, sites, 0, make_adapter(1, 4))
    routing = routing_from_slots(jnp.zeros(3, jnp.int32), SLOTS)
    install(model, bank, routing)
    before = model(inputs(3))
    _, weights = split(model)
    kinds = {type(variable) for _, variable in nnx.to_flat_state(weights)}
    assert kinds == {nnx.Param, LoRASlots, LoRARouting}
    assert not jax.tree.leaves(nnx.filter_state(weights, (LoRASlots, LoRARouting)))
    np.testing.assert_array_equal(model(inputs(3)), before)


def test_params_of_the_wrapped_model_are_the_base_models():
    model, _, bank = _setting()
    install(model, bank, routing_from_slots(jnp.zeros(3, jnp.int32), SLOTS))
    wrapped = nnx.to_flat_state(nnx.state(model, nnx.Param))
    base = nnx.to_flat_state(nnx.state(Toy(), nnx.Param))
    assert [path for path, _ in wrapped] == [path for path, _ in base]


def test_a_step_keeps_the_bank_it_was_given():
    model, sites, bank = _setting()
    graphdef, weights = split(model)
    routing = routing_from_slots(jnp.zeros(3, jnp.int32), SLOTS)
    held = _with(bank, sites, 0, make_adapter(1, 4))
    before = forward(graphdef, weights, held, routing, inputs(3))
    _with(held, sites, 0, make_adapter(2, 4))
    after = forward(graphdef, weights, held, routing, inputs(3))
    np.testing.assert_array_equal(before, after)


def test_merge_gives_a_module_whose_methods_can_be_called():
    model, sites, bank = _setting()
    graphdef, weights = split(model)
    bank = _with(bank, sites, 0, make_adapter(1, 4))
    routing = routing_from_slots(jnp.zeros(3, jnp.int32), SLOTS)
    copy = merge(graphdef, weights, bank, routing)
    np.testing.assert_array_equal(
        copy.blocks[0](inputs(3)), _installed(model, bank, routing).blocks[0](inputs(3))
    )


def _installed(model, bank, routing):
    install(model, bank, routing)
    return model


def test_the_module_itself_runs_under_jit():
    model, sites, bank = _setting()
    bank = _with(bank, sites, 0, make_adapter(1, 4))
    install(model, bank, routing_from_slots(jnp.asarray([0, -1, 0]), SLOTS))
    eager = model(inputs(3))
    for jitted in (jax.jit(lambda m, x: m(x)), nnx.jit(lambda m, x: m(x))):
        np.testing.assert_allclose(jitted(model, inputs(3)), eager, atol=1e-6)


def test_a_jit_may_close_over_the_weights():
    model, sites, bank = _setting()
    graphdef, weights = split(model)
    bank = _with(bank, sites, 0, make_adapter(1, 4))
    routing = routing_from_slots(jnp.asarray([0, -1, 0]), SLOTS)
    closed = jax.jit(lambda x: forward(graphdef, weights, bank, routing, x))
    expected = forward(graphdef, weights, bank, routing, inputs(3))
    np.testing.assert_allclose(closed(inputs(3)), expected, atol=1e-6)
