"""Models that other people wrote: served as they are, their code unchanged.

A decoder in the manner of bonsai's Qwen3: `nnx.Einsum` with separate head axes, whose
code reads `.kernel.shape`; an `nnx.MultiHeadAttention`; and layers stacked by
`nnx.vmap` for `nnx.scan`. Wrapping must leave paths, checkpoints and jit alone.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from lora_jax import LoRAConfig, LoRAMapping, LoRAModelManager
from lora_jax.adapters import Adapter, LowRank, Report
from lora_jax.forward import forward, split
from lora_jax.layers import LoRALayer, unwrap

DIM, HEADS, KV_HEADS, HEAD_DIM, WIDE, LAYERS, VOCAB = 8, 2, 1, 4, 12, 2, 11
TOLERANCE = 2e-5
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.q_proj = nnx.Einsum("BTD,DNH->BTNH", (DIM, HEADS, HEAD_DIM), rngs=rngs)
        self.k_proj = nnx.Einsum("BSD,DKH->BSKH", (DIM, KV_HEADS, HEAD_DIM), rngs=rngs)
        self.v_proj = nnx.Einsum("BSD,DKH->BSKH", (DIM, KV_HEADS, HEAD_DIM), rngs=rngs)
        self.o_proj = nnx.Einsum("BTNH,NHD->BTD", (HEADS, HEAD_DIM, DIM), rngs=rngs)

    def __call__(self, x):
        groups = self.q_proj.kernel.shape[1] // self.k_proj.kernel.shape[1]
        head_dim = self.q_proj.kernel.shape[-1]
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / head_dim**0.5
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = nnx.softmax(jnp.where(causal, scores, -jnp.inf))
        return self.o_proj(jnp.einsum("BNTS,BSNH->BTNH", weights, v))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attn = Attention(rngs)
        self.up_proj = nnx.Einsum("BTD,DF->BTF", (DIM, WIDE), rngs=rngs)
        self.down_proj = nnx.Linear(WIDE, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(x)
        return x + self.down_proj(nnx.silu(self.up_proj(x)))


class Qwen(nnx.Module):
    """The embedding table is read, never called, as bonsai does."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embedder = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens):
        x = self.embedder.embedding[...][tokens]
        for layer in self.layers:
            x = layer(x)
        return x @ self.embedder.embedding[...].T


class Scanned(nnx.Module):
    def __init__(self):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return Block(rngs)

        self.embedder = nnx.Embed(VOCAB, DIM, rngs=nnx.Rngs(1))
        self.layers = create(nnx.Rngs(2))

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return run(self.embedder.embedding[...][tokens], self.layers)


class Attending(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(3)
        self.embedder = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, DIM, Q, decode=False, rngs=rngs)

    def __call__(self, tokens):
        return self.attn(self.embedder.embedding[...][tokens])


BLOCK = {
    "attn.q_proj": (DIM, Q),
    "attn.k_proj": (DIM, KV),
    "attn.v_proj": (DIM, KV),
    "attn.o_proj": (Q, DIM),
    "up_proj": (DIM, WIDE),
    "down_proj": (WIDE, DIM),
}
STACK = {
    f"layers.{n}.{name}": size for n in range(LAYERS) for name, size in BLOCK.items()
}
MODELS = {
    "einsum": (Qwen, STACK),
    "scan": (Scanned, STACK),
    "attention": (
        Attending,
        {f"attn.{name}": (DIM, Q) for name in ("query", "key", "value")}
        | {"attn.out": (Q, DIM)},
    ),
}
"""Name -> the model, and the widths of every module that an adapter names."""


def _adapter(number: int, sizes: dict[str, tuple[int, int]]) -> Adapter:
    rng = np.random.default_rng(number)
    parts = {
        name: LowRank(
            rng.normal(0, 0.5, (number, d_in)).astype("f4"),
            rng.normal(0, 0.5, (d_out, number)).astype("f4"),
            0.8,
        )
        for name, (d_in, d_out) in sizes.items()
    }
    return Adapter(f"a{number}", number, parts, str(number), Report((), (), 0))


def _merged(case: str, adapter: Adapter | None) -> nnx.Module:
    """A model of the same class whose kernels hold the adapter's updates."""
    model = MODELS[case][0]()
    for name, pair in ({} if adapter is None else adapter.parts).items():
        path, layer = name.split("."), None
        if case == "scan":
            layer = int(path.pop(1))
        module = model
        for key in path:
            module = module[int(key)] if key.isdigit() else getattr(module, key)
        kernel = np.array(module.kernel[...])
        own = kernel if layer is None else kernel[layer]
        own += (pair.scale * (pair.b @ pair.a).T).reshape(own.shape)
        module.kernel.set_value(jnp.asarray(kernel))
    return model


def _served(case: str) -> tuple[nnx.Module, LoRAModelManager, list[Adapter]]:
    kind, sizes = MODELS[case]
    model = kind()
    manager = LoRAModelManager(model, LoRAConfig(max_loras=2, max_lora_rank=3))
    adapters = [_adapter(number, sizes) for number in (2, 3)]
    for adapter in adapters:
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)
    return model, manager, adapters


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (4, 5)))
IDS = [2, 0, 3, 2]


@pytest.mark.parametrize("case", MODELS)
def test_each_row_equals_the_merged_model_however_it_is_run(case):
    model, manager, adapters = _served(case)
    alone = {0: _merged(case, None)} | {a.id: _merged(case, a) for a in adapters}
    outputs = {number: np.asarray(own(TOKENS)) for number, own in alone.items()}
    for left, right in itertools.combinations(outputs.values(), 2):
        assert np.abs(left - right).max(axis=(1, 2)).min() > 10 * TOLERANCE
    expected = np.stack([outputs[number][row] for row, number in enumerate(IDS)])
    manager.set_adapter_mapping(LoRAMapping(np.repeat(IDS, 5).tolist(), IDS))
    graphdef, weights = split(model)
    runs = {
        "called": model(TOKENS),
        "the module passed to jax.jit": jax.jit(lambda m, x: m(x))(model, TOKENS),
        "the module passed to nnx.jit": nnx.jit(lambda m, x: m(x))(model, TOKENS),
        "split and merged": jax.jit(forward, static_argnums=0)(
            graphdef, weights, manager.bank, manager.routing, TOKENS
        ),
        "a clone": nnx.clone(model)(TOKENS),
    }
    for how, got in runs.items():
        np.testing.assert_allclose(got, expected, atol=TOLERANCE, err_msg=how)
    np.testing.assert_array_equal(runs["called"][1], outputs[0][1])


@pytest.mark.parametrize("case", MODELS)
def test_parameters_keep_their_paths_types_and_values(case):
    base = MODELS[case][0]()
    model, *_ = _served(case)
    before = nnx.to_flat_state(nnx.state(base, nnx.Param))
    after = nnx.to_flat_state(nnx.state(model, nnx.Param))
    assert [path for path, _ in after] == [path for path, _ in before]
    for (_, left), (_, right) in zip(before, after, strict=True):
        np.testing.assert_array_equal(left[...], right[...])
    plain = {type(module) for _, module in nnx.iter_modules(base)}
    wrapped = {type(module) for _, module in nnx.iter_modules(model)}
    assert all(any(issubclass(new, old) for new in wrapped) for old in plain)
    assert any(issubclass(kind, LoRALayer) for kind in wrapped)
    unwrap(model)
    assert nnx.graphdef(model) == nnx.graphdef(base)


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("saved_by", ["base", "wrapped"])
def test_checkpoints_of_one_are_checkpoints_of_the_other(case, saved_by, tmp_path):
    changed = _merged(case, _adapter(1, MODELS[case][1]))
    wanted = np.asarray(changed(TOKENS))
    model, manager, _ = _served(case)
    source, target = (changed, model) if saved_by == "base" else (model, changed)
    if saved_by == "wrapped":
        wanted = np.asarray(MODELS[case][0]()(TOKENS))
    with ocp.StandardCheckpointer() as checkpointer:
        state = nnx.to_pure_dict(nnx.state(source, nnx.Param))
        checkpointer.save(tmp_path / "saved", state)
        checkpointer.wait_until_finished()
        own = nnx.state(target, nnx.Param)
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(own))
        restored = checkpointer.restore(tmp_path / "saved", shapes)
    nnx.replace_by_pure_dict(own, restored)
    nnx.update(target, own)
    manager.set_adapter_mapping(LoRAMapping([0] * 20, [0] * 4))
    np.testing.assert_allclose(target(TOKENS), wanted, atol=TOLERANCE)
