"""Layers stacked by `nnx.vmap` and run by `nnx.scan`, each with its own update."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax import LoRAConfig, LoRAMapping, LoRAModelManager
from lora_jax.adapters import adapter_from_tensors
from lora_jax.forward import forward, split
from lora_jax.layers.stacked import stacked_prefix

LAYERS, WIDTH, HIDDEN = 3, 6, 10
ROWS = 5


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Einsum("...F,FD->...D", (HIDDEN, WIDTH), rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.tanh(self.up(x)))


class Stacked(nnx.Module):
    """Written by somebody who has never heard of LoRA."""

    def __init__(self):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return Block(rngs)

        self.blocks = create(nnx.Rngs(0))
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return block(x)

        return self.out(run(x, self.blocks))


def _adapter(number, modules, rank):
    rng = np.random.default_rng(number)
    tensors = {}
    for module in modules:
        name = module.rpartition(".")[2]
        sizes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "out": (WIDTH, WIDTH)}
        d_in, d_out = sizes[name]
        a, b = rng.normal(size=(rank, d_in)), rng.normal(size=(d_out, rank))
        tensors[f"{module}.lora_A.weight"] = (0.4 * a).astype("f4")
        tensors[f"{module}.lora_B.weight"] = (0.4 * b).astype("f4")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    config["target_modules"] = ["up"]
    return adapter_from_tensors(tensors, config, name=f"a{number}", adapter_id=number)


ADAPTERS = {
    1: _adapter(1, [f"blocks.{i}.{n}" for i in range(3) for n in ("up", "down")], 2),
    2: _adapter(2, ["blocks.1.up", "out"], 3),
}


def _merged(adapter):
    model = Stacked()
    for module, pair in {} if adapter is None else adapter.parts.items():
        update = jnp.asarray(pair.scale * (pair.b @ pair.a).T)
        if module == "out":
            model.out.kernel[...] += update
        else:
            _, layer, name = module.split(".")
            kernel = getattr(model.blocks, name).kernel
            kernel.set_value(kernel[...].at[int(layer)].add(update))
    return model


def _served():
    model = Stacked()
    manager = LoRAModelManager(model, LoRAConfig(max_loras=3, max_lora_rank=4))
    for number, adapter in ADAPTERS.items():
        manager.add_adapter(adapter)
        manager.activate_adapter(number)
    return model, manager


def test_each_layer_has_its_own_update():
    ids = [1, 0, 2, 1, 0]
    x = jnp.asarray(np.random.default_rng(9).normal(size=(ROWS, WIDTH)).astype("f4"))
    alone = {i: np.asarray(_merged(ADAPTERS.get(i))(x)) for i in (0, 1, 2)}
    assert np.abs(alone[0] - alone[1]).max(axis=-1).min() > 1e-2
    assert np.abs(alone[0] - alone[2]).max(axis=-1).min() > 1e-2
    model, manager = _served()
    manager.set_adapter_mapping(LoRAMapping(ids, [1]))
    expected = np.stack([alone[i][row] for row, i in enumerate(ids)])
    np.testing.assert_allclose(model(x), expected, atol=1e-5)
    graphdef, weights = split(model)
    pure = nnx.jit(forward, static_argnums=0)(
        graphdef, weights, manager.bank, manager.routing, x
    )
    np.testing.assert_allclose(pure, expected, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(pure)[1], alone[0][1])


def test_arrays_have_the_layers_first():
    _, manager = _served()
    shapes = {
        key: array.shape for key, array in manager.bank.arrays["blocks.up"].items()
    }
    assert shapes == {
        "a": (LAYERS, 3, 1, 4, WIDTH),
        "b": (LAYERS, 3, 4, HIDDEN),
        "scale": (LAYERS, 3, 1),
        "rank": (LAYERS, 3, 1),
    }
    assert manager.bank.num_slots == 3
    np.testing.assert_array_equal(
        manager.bank.arrays["blocks.up"]["rank"][:, :, 0],
        [[2, 0, 0], [2, 3, 0], [2, 0, 0]],
    )


def test_a_reused_slot_keeps_nothing_in_any_layer():
    _, manager = _served()
    manager.deactivate_adapter(1)
    for array in manager.bank.arrays["blocks.down"].values():
        assert not np.asarray(array)[:, 0].any()


def test_the_stack_is_the_outermost_module_with_the_layers_first():
    assert stacked_prefix(Stacked(), "blocks.up", LAYERS) == "blocks"


@pytest.mark.parametrize("name", ["blocks.3.up", "blocks.up"])
def test_a_layer_that_is_not_there_is_unknown(name):
    _, manager = _served()
    assert name not in manager.sites.targets
