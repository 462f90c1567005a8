"""A toy model, adapters for it, and the oracle: each row with its merged weights."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.adapters import Adapter, adapter_from_tensors
from lora_jax.layers import Sites
from lora_jax.models.linear import FusedLinear

WIDTH = 16
QKV = (("q_proj", 12), ("k_proj", 4), ("v_proj", 4))
TOLERANCE = 1e-5
"""Of float32 outputs of the toy model, whose values are of order 1."""


class Block(nnx.Module):
    """A fused projection, a square one, and one with a bias."""

    def __init__(self, rngs: nnx.Rngs, dtype: str):
        kinds = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(dtype)}
        self.qkv_proj = FusedLinear(WIDTH, QKV, use_bias=False, dtype=dtype, rngs=rngs)
        self.o_proj = nnx.Linear(20, WIDTH, use_bias=False, rngs=rngs, **kinds)
        self.fc = nnx.Linear(WIDTH, WIDTH, use_bias=True, rngs=rngs, **kinds)

    def __call__(self, x):
        x = x + self.o_proj(nnx.tanh(self.qkv_proj(x)))
        return x + self.fc(nnx.tanh(x))


class Toy(nnx.Module):
    """Two blocks; `shared` is a second path to the first block's square layer."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def __init__(self, seed: int = 0, dtype: str = "float32"):
        rngs = nnx.Rngs(seed)
        self.blocks = nnx.List([Block(rngs, dtype) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.shared = self.blocks[0].fc

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


MODULES = tuple(
    f"blocks.{layer}.{name}"
    for layer in range(2)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "fc")
)
"""Every module of the toy model that an adapter can name, fused ones by child."""

SIZES = {
    "q_proj": (WIDTH, 12),
    "k_proj": (WIDTH, 4),
    "v_proj": (WIDTH, 4),
    "qkv_proj": (WIDTH, 20),
    "o_proj": (20, WIDTH),
    "fc": (WIDTH, WIDTH),
}
"""Last name -> input and output width."""


def make_adapter(
    seed: int,
    rank: int,
    *,
    modules: Sequence[str] = MODULES,
    alpha: float | None = None,
    ranks: Mapping[str, int] | None = None,
    adapter_id: int | None = None,
) -> Adapter:
    """Returns an adapter whose update is visible: A and B of order 0.3, none zero.

    Args:
      ranks: module -> rank, where it is not `rank`.
      alpha: `lora_alpha`; twice the rank if None.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for module in modules:
        d_in, d_out = SIZES[module.rpartition(".")[2]]
        own = (ranks or {}).get(module, rank)
        key = f"base_model.model.{module}"
        tensors[f"{key}.lora_A.weight"] = _normal(rng, own, d_in)
        tensors[f"{key}.lora_B.weight"] = _normal(rng, d_out, own)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "rank_pattern": dict(ranks or {}),
    }
    return adapter_from_tensors(
        tensors, config, name=f"a{seed}", adapter_id=adapter_id or seed
    )


def merged(model: Toy, adapter: Adapter | None) -> Toy:
    """Returns a copy of an unwrapped model, merged with the adapter in float64."""
    copy = nnx.clone(model)
    for module, pair in ({} if adapter is None else adapter.parts).items():
        _, layer, name = module.split(".")
        block = copy.blocks[int(layer)]
        fused = not hasattr(block, name)
        target = block.qkv_proj if fused else getattr(block, name)
        kernel = np.array(target.kernel[...], np.float64)
        columns = _columns(name) if fused else slice(None)
        update = pair.a.astype(np.float64).T @ pair.b.astype(np.float64).T
        kernel[:, columns] += pair.scale * update
        target.kernel.set_value(jnp.asarray(kernel, target.kernel.dtype))
    return copy


def inputs(rows: int, seed: int = 0) -> jnp.ndarray:
    """Returns `(rows, WIDTH)` activations."""
    return jnp.asarray(_normal(np.random.default_rng(seed), rows, WIDTH) / 0.3)


def expected_rows(
    model: Toy, adapters: Sequence[Adapter | None], x: jnp.ndarray
) -> np.ndarray:
    """Returns each row's output with that row's adapter merged; `model` is unwrapped.

    The visibility guard is here: adapters that cannot be told apart prove nothing.
    """
    distinct = {None: None} | {a.id: a for a in adapters if a is not None}
    outputs = {key: np.asarray(merged(model, a)(x)) for key, a in distinct.items()}
    keys = list(outputs)
    for i, left in enumerate(keys):
        for right in keys[i + 1 :]:
            gap = np.abs(outputs[left] - outputs[right]).max(axis=-1).min()
            assert gap > 10 * TOLERANCE, (left, right, gap)
    return np.stack(
        [
            outputs[None if adapter is None else adapter.id][row]
            for row, adapter in enumerate(adapters)
        ]
    )


def slots_from_scratch(sites: Sites) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shape of every slot array of a wrapped model, for tree comparison."""
    return {
        name: {key: spec.shape for key, spec in layer.slot_spec("float32").items()}
        for name, layer in sites.items()
    }


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(0.0, 0.3, shape).astype(np.float32)


def _columns(child: str) -> slice:
    starts = np.cumsum([0, *(width for _, width in QKV)])
    part = [name for name, _ in QKV].index(child)
    return slice(int(starts[part]), int(starts[part + 1]))
