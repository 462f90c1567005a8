"""LoRA on quantised experts: the oracle merges into the dequantised kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from expert_files import FILES, Sizes
from expert_models import build, make, serve
from lora_jax import LoRAConfig, LoRAMapping, LRUCacheLoRAModelManager, shard_experts
from lora_jax.adapters import adapter_from_tensors, save_adapter
from lora_jax.errors import ModelError
from lora_jax.models import CausalLM, config_from_dict
from lora_jax.models.experts import ExpertLinear
from lora_jax.models.quantize import dequantized, is_quantized, quantize
from lora_jax.serving import Engine, GenerationRequest
from lora_kernels import make_routing

# qwix 0.1.8 looks at every attribute of a module, deprecated ones included.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SIZES = Sizes(4, 12, 10)
TOKENS, TOP_K, RANK = 24, 2, 3
TOLERANCE = 2e-5
"""Of outputs of order 1, float32 against float64."""

LAYOUTS = ("pairs", "mixtral_names", "fused", "doubled_rank", "shared_outer", "router")


def kernel_of(layer):
    """Returns what the layer multiplies by, `(experts, d_out, d_in)` in float64."""
    values, scale = (
        np.asarray(a[...], np.float64) for a in (layer.kernel, layer.scale)
    )
    return (values * scale[:, None]).swapaxes(1, 2)


def weights_of(block):
    both = kernel_of(block.experts.gate_up_proj)
    return {
        "router": np.asarray(block.gate.kernel[...], np.float64).T,
        "gate": both[:, : SIZES.width],
        "up": both[:, SIZES.width :],
        "down": kernel_of(block.experts.down_proj),
    }


def answer(weights, deltas, x):
    """Returns one token's output with `deltas` in the dense weights, float64."""
    router, gate, up, down = (
        weights[role] + deltas.get(role, 0) for role in ("router", "gate", "up", "down")
    )
    odds = np.exp(router @ x - (router @ x).max())
    odds /= odds.sum()
    out = np.zeros_like(x)
    for expert in np.argsort(-odds)[:TOP_K]:
        inner = gate[expert] @ x
        inner = inner / (1 + np.exp(-inner)) * (up[expert] @ x)
        out += odds[expert] * (down[expert] @ inner)
    return out


def tokens():
    return np.random.default_rng(1).standard_normal((TOKENS, SIZES.d))


@pytest.mark.parametrize("devices", [1, 2])
def test_every_layout_in_one_batch_on_the_dequantised_base(devices):
    model = build(SIZES, TOP_K)
    x = tokens()
    exact = np.asarray(model(jnp.asarray(x, jnp.float32)))
    quantize(model, "int8")
    if devices > 1:
        shard_experts(model, jax.make_mesh((devices,), ("expert",)))
    weights = weights_of(model.block)
    plain = np.asarray(model(jnp.asarray(x, jnp.float32)))
    assert np.abs(exact - plain).max() > 20 * TOLERANCE
    made = [
        make(name, SIZES, RANK, seed=i, adapter_id=i)
        for i, name in enumerate(LAYOUTS, start=1)
    ]
    manager = serve(model, [adapter for adapter, _ in made])
    ids = np.arange(TOKENS) % (len(made) + 1)
    manager.set_adapter_mapping(LoRAMapping(ids.tolist(), []))
    found = np.asarray(model(jnp.asarray(x, jnp.float32)))
    moved = np.zeros(len(made) + 1)
    for row, id_ in enumerate(ids):
        expected = answer(weights, made[id_ - 1][1] if id_ else {}, x[row])
        np.testing.assert_allclose(found[row], expected, atol=TOLERANCE, rtol=TOLERANCE)
        moved[id_] = max(moved[id_], np.abs(expected - plain[row]).max())
    np.testing.assert_array_equal(found[ids == 0], plain[ids == 0])
    assert (moved[1:] > 10 * TOLERANCE).all()
    site = manager.bank.arrays["model.layers.0.mlp.experts.down_proj"]
    assert site["a"].dtype == jnp.float32


def test_experts_are_small_and_routers_stay_as_they_are():
    model = build(SIZES, TOP_K)
    router = model.block.gate.kernel[...]
    first = model.block.experts.gate_up_proj
    before = np.asarray(first.kernel[...])
    quantize(model, "int8")
    np.testing.assert_array_equal(model.block.gate.kernel[...], router)
    shapes = {
        name: (variable.dtype.name, variable.shape)
        for name, variable in vars(first).items()
        if isinstance(variable, nnx.Variable)
    }
    assert shapes == {
        "kernel": ("int8", (4, 12, 20)),
        "scale": ("float32", (4, 20)),
    }
    # The largest of each output's weights is a whole number of the 127.5 steps.
    step = np.abs(before).max(axis=1) / 127.5
    np.testing.assert_allclose(first.scale[...], step, rtol=1e-6)
    error = np.abs(kernel_of(first).swapaxes(1, 2) - before)
    assert (error <= 0.51 * step[:, None]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_integers_are_wider_than_the_activations(dtype):
    """Sums of 127 times 300 overflow float16 before they are scaled."""
    model = build(SIZES, TOP_K)
    layer = model.block.experts.down_proj
    layer.kernel.set_value(layer.kernel[...].astype(dtype))
    quantize(model, "int8")
    group = np.array([0, 3, -1, 2], np.int32)
    x = jnp.full((4, SIZES.width), 300, dtype)
    found = layer(x, make_routing(jnp.asarray(group), SIZES.experts))
    assert found.dtype == dtype
    expected = kernel_of(layer)[group] @ np.full(SIZES.width, 300.0)
    expected[group < 0] = 0
    limit = 2.0**-7 * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=limit)


@pytest.mark.parametrize("kind", ["int4", "nf4"])
def test_kinds_with_tiles_are_refused_before_anything_changes(kind):
    model = build(SIZES, TOP_K)
    with pytest.raises(
        ModelError, match=f"has experts, whose kernels cannot be {kind}"
    ):
        quantize(model, kind)
    assert model.block.experts.down_proj.kernel.dtype == jnp.float32


CONFIG = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 61,
    "hidden_size": SIZES.d * 2,
    "intermediate_size": SIZES.width,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_local_experts": SIZES.experts,
    "num_experts_per_tok": TOP_K,
    "tie_word_embeddings": False,
}
WIDE = Sizes(SIZES.experts, SIZES.d * 2, SIZES.width)
LENGTH = 200
PROMPT = (5, 9, 2, 30)


def language_model():
    model = CausalLM(
        config_from_dict(CONFIG, origin="tiny"), dtype="float32", rngs=nnx.Rngs(0)
    )
    # Experts matter, and logits spread, so that greedy choices are clear.
    factors = {"kernel": 3.0, "embedding": 3.0}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        variable.set_value(variable[...] * factors.get(str(path[-1]), 1.0))
    return model


def adapter_of_all_layers(name, seed):
    """Returns an adapter of every layer's experts, and what it adds in each layer."""
    tensors, deltas = {}, []
    config = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        file = FILES[name](np.random.default_rng([seed, layer]), WIDE, RANK)
        path = f"base_model.model.model.layers.{layer}."
        tensors |= {
            key.replace("model.layers.0.", path): np.float32(0.5) * array
            for key, array in file.tensors.items()
        }
        deltas.append({role: 0.25 * delta for role, delta in file.deltas.items()})
        config = dict(file.config)
    config |= {"peft_type": "LORA", "lora_alpha": 6.0}
    adapter = adapter_from_tensors(tensors, config, name=name, adapter_id=seed)
    return adapter, deltas


def merged(quantised, deltas):
    """Returns a float model of the dequantised kernels and an adapter's change."""
    model = language_model()
    own, theirs = dict(nnx.iter_modules(model)), dict(nnx.iter_modules(quantised))
    for path, layer in own.items():
        if isinstance(layer, ExpertLinear):
            change = deltas[path[2]] if deltas else {}
            added = [change.get(role, 0) for role in ("gate", "up")]
            if layer.parts[0][0] == "down_proj":
                added = [change.get("down", 0)]
            pieces = np.split(kernel_of(theirs[path]), len(added), axis=1)
            whole = [p + extra for p, extra in zip(pieces, added, strict=True)]
            kernel = np.concatenate(whole, axis=1).swapaxes(1, 2)
            layer.kernel.set_value(jnp.asarray(kernel, jnp.float32))
        elif isinstance(layer, nnx.Linear) and is_quantized(theirs[path]):
            layer.kernel.set_value(dequantized(theirs[path]))
    return model


def greedy(model, manager, loras):
    engine = Engine(
        model,
        manager,
        max_num_seqs=3,
        max_model_len=LENGTH + len(PROMPT),
        prefill_lengths=[8],
    )
    for name, folder in loras.items():
        engine.adapters.add(name, folder)
    requests = [
        GenerationRequest(str(name), PROMPT, max_tokens=LENGTH, lora=name)
        for name in (None, *loras)
    ]
    return [list(result.token_ids) for result in engine.generate(requests)]


def test_long_texts_are_those_of_the_merged_dequantised_models(tmp_path):
    model = language_model()
    quantize(model, "int8")
    answers, loras = greedy(merged(model, None), None, {}), {}
    for seed, name in enumerate(("fused", "shared_outer"), start=1):
        adapter, deltas = adapter_of_all_layers(name, seed)
        loras[name] = save_adapter(adapter, tmp_path / name)
        answers += greedy(merged(model, deltas), None, {})
    manager = LRUCacheLoRAModelManager(model, LoRAConfig(max_loras=2, max_lora_rank=8))
    found = greedy(model, manager, loras)
    assert found == answers
    assert len({tuple(text) for text in found}) == 3
    assert all(len(text) == LENGTH and len(set(text)) > 8 for text in found)
