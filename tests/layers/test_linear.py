"""The linear LoRA layer against merged weights, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers import TOLERANCE, Toy, expected_rows, inputs, make_adapter
from lora_jax.adapters import LowRank
from lora_jax.bank import empty_bank, stage, write
from lora_jax.config import LoRAConfig
from lora_jax.forward import install
from lora_jax.layers import wrap
from lora_jax.packing import pack
from lora_jax.routing import routing_from_slots


def _run(adapters, rows_slots, x, *, max_rank=8, slots=4):
    model = Toy()
    sites = wrap(model, LoRAConfig(max_lora_rank=max_rank, max_loras=slots))
    bank = empty_bank(sites, slots, np.dtype("float32"))
    for slot, adapter in adapters.items():
        bank = write(bank, slot, stage(bank, pack(adapter, sites, np.dtype("float32"))))
    install(model, bank, routing_from_slots(jnp.asarray(rows_slots), slots))
    return np.asarray(model(x))


CASES = {
    "all modules": {1: make_adapter(1, 4), 3: make_adapter(2, 8)},
    "one child of the fused layer": {
        0: make_adapter(1, 4, modules=["blocks.0.k_proj"]),
        2: make_adapter(2, 4, modules=["blocks.0.v_proj", "blocks.1.fc"]),
    },
    "ranks differ inside the fused layer": {
        0: make_adapter(1, 4, ranks={"blocks.0.q_proj": 1, "blocks.0.v_proj": 7}),
        1: make_adapter(2, 2, ranks={"blocks.1.k_proj": 8}),
    },
    "saved under the fused name": {
        0: make_adapter(1, 4, modules=["blocks.0.qkv_proj", "blocks.1.o_proj"]),
        1: make_adapter(2, 4),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_mixed_rows_equal_each_row_with_its_adapter_merged(name):
    adapters = CASES[name]
    first, second = adapters
    rows_slots = [first, -1, second, first, -1, second, second]
    x = inputs(len(rows_slots))
    names = {slot: _split_fused(adapter) for slot, adapter in adapters.items()}
    expected = expected_rows(Toy(), [names.get(slot) for slot in rows_slots], x)
    np.testing.assert_allclose(
        _run(adapters, rows_slots, x), expected, atol=TOLERANCE, rtol=0
    )


def _split_fused(adapter):
    """The same adapter as the oracle reads it: fused pairs cut into their children."""
    parts = dict(adapter.parts)
    for module in [name for name in parts if name.endswith("qkv_proj")]:
        pair, start = parts.pop(module), 0
        for child, width in (("q_proj", 12), ("k_proj", 4), ("v_proj", 4)):
            rows = pair.b[start : start + width]
            name = f"{module.rpartition('.')[0]}.{child}"
            parts[name] = LowRank(a=pair.a, b=rows, scale=pair.scale)
            start += width

    class View:
        id = adapter.id

    View.parts = parts
    return View


def test_base_rows_are_bit_for_bit_the_base_model():
    x = inputs(6)
    base = np.asarray(Toy()(x))
    mixed = _run(
        {0: make_adapter(1, 4), 1: make_adapter(2, 8)}, [-1, 0, -1, 1, 7, -5], x
    )
    np.testing.assert_array_equal(mixed[[0, 2, 4, 5]], base[[0, 2, 4, 5]])
    assert np.abs(mixed[[1, 3]] - base[[1, 3]]).max(axis=-1).min() > 10 * TOLERANCE


def test_inputs_with_more_axes_are_flattened_to_rows():
    adapter = make_adapter(1, 4)
    x = inputs(6)
    flat = _run({0: adapter}, [0, -1, 0, 0, -1, -1], x)
    cube = _run({0: adapter}, [0, -1, 0, 0, -1, -1], x.reshape(2, 3, -1))
    np.testing.assert_allclose(cube.reshape(6, -1), flat, atol=1e-6)


def test_routing_for_another_number_of_rows_is_refused():
    with pytest.raises(
        ValueError, match=r"blocks.0.qkv_proj: the routing names 3 rows"
    ):
        _run({}, [0, 0, -1], inputs(4))


@pytest.mark.parametrize(("rank", "max_rank"), [(24, 24), (4, 256), (1, 256)])
def test_a_rank_may_exceed_the_widths_and_lie_far_below_the_cap(rank, max_rank):
    adapters = {0: make_adapter(1, rank, alpha=4.0), 1: make_adapter(2, 2)}
    x = inputs(4)
    rows_slots = [0, 1, -1, 0]
    expected = expected_rows(Toy(), [adapters.get(slot) for slot in rows_slots], x)
    got = _run(adapters, rows_slots, x, max_rank=max_rank)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=1e-5)


def test_output_dtype_is_the_base_layers():
    model = Toy(dtype="bfloat16")
    sites = wrap(model, LoRAConfig(max_lora_rank=4))
    bank = empty_bank(sites, 1, np.dtype("float32"))
    install(model, bank, routing_from_slots(jnp.zeros(3, jnp.int32), 1))
    assert model.blocks[0].fc(inputs(3).astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_every_reason_why_a_pair_does_not_fit_is_given():
    model = Toy()
    layer = wrap(model, LoRAConfig(max_lora_rank=4))["blocks.0.qkv_proj"]
    pair = LowRank(a=np.ones((5, 15), "f4"), b=np.ones((6, 5), "f4"), scale=1.0)
    assert layer.faults(1, pair) == [
        "lora_A has input width 15, the layer has 16.",
        "lora_B has output width 6, the layer has 4.",
        "rank 5 exceeds max_lora_rank=4; raise max_lora_rank or retrain.",
    ]
    wide = LowRank(a=np.ones((2, 16), "f4"), b=np.ones((20, 2), "f4"), scale=1.0)
    assert layer.faults(None, wide) == []


def test_a_call_argument_of_the_base_layer_is_forwarded():
    class Scaled(nnx.Linear):
        def __call__(self, inputs, factor, *, shift):
            return factor * super().__call__(inputs) + shift

    class Model(nnx.Module):
        def __init__(self):
            self.fc = Scaled(3, 3, rngs=nnx.Rngs(0))

    model = Model()
    x = jax.numpy.ones((2, 3))
    expected = model.fc(x, 3.0, shift=1.0)
    wrap(model, LoRAConfig())
    np.testing.assert_array_equal(model.fc(x, 3.0, shift=1.0), expected)


def test_a_forward_of_the_base_layers_own_is_kept_and_the_update_added_to_it():
    class Gate(nnx.Linear):
        def __call__(self, inputs):
            return nnx.softmax(3 * super().__call__(inputs))

    class Model(nnx.Module):
        def __init__(self):
            self.fc = Gate(16, 16, rngs=nnx.Rngs(0))

    model, x = Model(), inputs(3)
    base = np.asarray(model.fc(x))
    sites = wrap(model, LoRAConfig(max_lora_rank=4))
    adapter = make_adapter(1, 4, modules=["fc"])
    bank = empty_bank(sites, 1, np.dtype("float32"))
    bank = write(bank, 0, stage(bank, pack(adapter, sites, np.dtype("float32"))))
    install(model, bank, routing_from_slots(jnp.asarray([0, -1, 0]), 1))
    pair = adapter.parts["fc"]
    update = pair.scale * np.asarray(x, np.float64) @ (pair.b @ pair.a).T
    update[1] = 0
    assert np.abs(update[[0, 2]]).max() > 0.1
    np.testing.assert_allclose(model.fc(x), base + update, atol=TOLERANCE)
