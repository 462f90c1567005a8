"""A model of one block with experts, at the path that `expert_files` names."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from expert_files import ALPHA, FILES
from lora_jax import LoRAConfig, LRUCacheLoRAModelManager
from lora_jax.adapters import adapter_from_tensors
from lora_jax.models.experts import Experts


class Block(nnx.Module):
    """A router and its experts."""

    def __init__(self, sizes, top_k, rngs, *, gated=True):
        self.gate = nnx.Linear(sizes.d, sizes.experts, use_bias=False, rngs=rngs)
        self.experts = Experts(
            sizes.experts,
            sizes.d,
            sizes.width,
            gated=gated,
            activation="silu" if gated else "relu2",
            use_bias=sizes.interleaved,
            interleaved=sizes.interleaved,
            stored_in_out=sizes.interleaved,
            dtype="float32",
            rngs=rngs,
        )
        self.top_k = top_k

    def __call__(self, x):
        odds = jax.nn.softmax(self.gate(x).astype(jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(odds, self.top_k)
        return self.experts(x, chosen.astype(jnp.int32), weights)


class Model(nnx.Module):
    """One block at the path that files name."""

    def __init__(self, sizes, top_k, gated, rngs):
        layer = nnx.Dict(mlp=Block(sizes, top_k, rngs, gated=gated))
        self.model = nnx.Dict(layers=nnx.List([layer]))

    @property
    def block(self):
        return self.model["layers"][0]["mlp"]

    def __call__(self, x):
        return self.block(x)


def build(sizes, top_k, *, gated=True):
    """Returns a model with NumPy's random weights, which nothing compiles for."""
    rng = np.random.default_rng(0)
    model = nnx.eval_shape(lambda: Model(sizes, top_k, gated, nnx.Rngs(0)))
    graphdef, state = nnx.split(model)

    def draw(leaf):
        return jnp.asarray(0.3 * rng.standard_normal(leaf.shape), leaf.dtype)

    return nnx.merge(graphdef, jax.tree.map(draw, state))


def make(name, sizes, rank, *, seed, adapter_id):
    """Returns a file's adapter and what it adds to each expert."""
    file = FILES[name](np.random.default_rng(seed), sizes, rank)
    tensors = {f"base_model.model.{n}": array for n, array in file.tensors.items()}
    config = {"peft_type": "LORA", "lora_alpha": ALPHA, **file.config}
    adapter = adapter_from_tensors(tensors, config, name=name, adapter_id=adapter_id)
    return adapter, file.deltas


def serve(model, adapters, max_rank=16):
    manager = LRUCacheLoRAModelManager(
        model, LoRAConfig(max_loras=len(adapters), max_lora_rank=max_rank)
    )
    for adapter in adapters:
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)
    return manager
