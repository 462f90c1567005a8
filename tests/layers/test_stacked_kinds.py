"""Biases and DoRA on the layers of a stack: the oracle runs the layers one by one."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax import LoRAConfig, LoRAMapping, LoRAModelManager
from lora_jax.adapters import (
    Adapter,
    AdapterPart,
    DoRA,
    LoRABias,
    LowRank,
    ReplacedBias,
    Report,
)
from lora_jax.forward import forward, split

LAYERS, WIDTH, HIDDEN = 3, 6, 10
TOLERANCE = 2e-5


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Einsum("...D,DNH->...NH", (WIDTH, 2, 5), (2, 5), rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)
        # Biases begin as zeros, and a zero cannot be told from no bias at all.
        self.up.bias.set_value(rngs.params.normal((2, 5)))

    def __call__(self, x):
        hidden = nnx.tanh(self.up(x))
        return x + self.down(hidden.reshape(*x.shape[:-1], HIDDEN))


class Stacked(nnx.Module):
    """Written by somebody who has never heard of LoRA."""

    def __init__(self):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return Block(rngs)

        self.blocks = create(nnx.Rngs(0))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return block(x)

        return run(x, self.blocks)


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.6, shape).astype(np.float32)


def _up(seed: int) -> LowRank:
    return LowRank(_normal(seed, 2, WIDTH), _normal(seed + 1, HIDDEN, 2), 0.7)


def _down(seed: int) -> LowRank:
    return LowRank(_normal(seed, 3, HIDDEN), _normal(seed + 1, WIDTH, 3), 0.4)


PARTS: dict[int, dict[str, AdapterPart]] = {
    1: {
        "blocks.0.up": LoRABias(_up(1), _normal(3, HIDDEN)),
        "blocks.2.up": DoRA(_up(4), 1 + np.abs(_normal(6, HIDDEN))),
        "blocks.1.down": DoRA(_down(7), 1 + np.abs(_normal(9, WIDTH))),
    },
    2: {
        "blocks.1.up": ReplacedBias(None, _normal(10, HIDDEN)),
        "blocks.2.up": ReplacedBias(
            DoRA(_up(11), 1 + np.abs(_normal(13, HIDDEN))), _normal(14, HIDDEN)
        ),
        "blocks.0.down": ReplacedBias(_down(15), _normal(17, WIDTH)),
    },
    3: {"blocks.1.up": _up(18)},
}
"""Adapter id -> module -> what is done to it: every kind, on different layers."""


def _adapter(number: int) -> Adapter:
    return Adapter(
        name=f"a{number}",
        id=number,
        parts=PARTS[number],
        content_hash=str(number),
        report=Report((), (), 0),
    )


def _changed(
    kernel: np.ndarray, bias: np.ndarray, part: AdapterPart | None
) -> tuple[np.ndarray, np.ndarray]:
    """A layer's kernel and bias under a part, by the definitions of the kinds."""
    kernel, bias = kernel.astype(np.float64), bias.astype(np.float64)
    if isinstance(part, ReplacedBias):
        bias, part = part.bias.astype(np.float64), part.update
    if part is None:
        return kernel, bias
    pair = part if isinstance(part, LowRank) else part.update
    kernel = kernel + pair.scale * (pair.b.astype(np.float64) @ pair.a).T
    if isinstance(part, DoRA):
        kernel = kernel * part.magnitude / np.linalg.norm(kernel, axis=0)
    if isinstance(part, LoRABias):
        bias = bias + pair.scale * part.bias
    return kernel, bias


def _expected(number: int, x: np.ndarray) -> np.ndarray:
    blocks, parts = Stacked().blocks, PARTS.get(number, {})
    for layer in range(LAYERS):
        up, up_bias = _changed(
            np.asarray(blocks.up.kernel[...])[layer].reshape(WIDTH, HIDDEN),
            np.asarray(blocks.up.bias[...])[layer].reshape(HIDDEN),
            parts.get(f"blocks.{layer}.up"),
        )
        down, down_bias = _changed(
            np.asarray(blocks.down.kernel[...])[layer],
            np.zeros(WIDTH),
            parts.get(f"blocks.{layer}.down"),
        )
        x = x + np.tanh(x @ up + up_bias) @ down + down_bias
    return x


def _served() -> LoRAModelManager:
    manager = LoRAModelManager(Stacked(), LoRAConfig(max_loras=4, max_lora_rank=4))
    for number in PARTS:
        manager.add_adapter(_adapter(number))
        manager.activate_adapter(number)
    return manager


def test_every_kind_equals_the_layers_one_by_one():
    ids = [1, 0, 2, 3, 1, 0, 2]
    x = _normal(30, len(ids), WIDTH)
    alone = {number: _expected(number, x) for number in (0, *PARTS)}
    for left, right in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
        gap = np.abs(alone[left] - alone[right]).max(axis=-1).min()
        assert gap > 10 * TOLERANCE, (left, right)
    manager = _served()
    manager.set_adapter_mapping(LoRAMapping(ids, [1]))
    expected = np.stack([alone[i][row] for row, i in enumerate(ids)])
    got = np.asarray(manager.model(jnp.asarray(x)))
    np.testing.assert_allclose(got, expected, atol=TOLERANCE)
    graphdef, weights = split(manager.model)
    step = nnx.jit(forward, static_argnums=0)
    pure = step(graphdef, weights, manager.bank, manager.routing, jnp.asarray(x))
    np.testing.assert_allclose(pure, expected, atol=TOLERANCE)
    base = np.asarray(Stacked()(jnp.asarray(x)))
    np.testing.assert_array_equal(got[[1, 5]], base[[1, 5]])


def test_biases_and_gains_have_the_layers_first():
    arrays = _served().bank.arrays
    for key in ("bias", "gain"):
        assert arrays["blocks.up"][key].shape == (LAYERS, 4, HIDDEN)
        assert arrays["blocks.down"][key].shape == (LAYERS, 4, WIDTH)
    touched = np.asarray(arrays["blocks.up"]["gain"]).any(axis=-1)
    np.testing.assert_array_equal(
        touched, [[False] * 4, [False] * 4, [True, True, False, False]]
    )


def test_a_reused_slot_keeps_no_bias_in_any_layer():
    manager = _served()
    manager.deactivate_adapter(2)
    for arrays in manager.bank.arrays.values():
        for array in arrays.values():
            assert not np.asarray(array)[:, 1].any()


@pytest.mark.parametrize("module", ["blocks.1.up", "blocks.0.down"])
def test_a_bias_of_another_width_is_refused(module):
    manager = _served()
    target = manager.sites.targets[module]
    width = manager.sites[target.site].lora_site.d_out
    part = ReplacedBias(None, _normal(0, width + 1))
    assert manager.sites[target.site].faults(target.part, part) == [
        f"the bias has shape ({width + 1},), the layer's is ({width},)."
    ]
