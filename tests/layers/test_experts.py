"""LoRA on experts: every layout of a file in one batch, against dense float64 experts.

The oracle knows nothing of pairs, slots or factors: for each token it adds the file's
change to the weights of all experts, and computes those that the token chose.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from expert_files import ALPHA, BLOCK, EXPERTS, FILES, Sizes
from expert_models import build, make, serve
from lora_jax import LoRAConfig, LoRAMapping, LRUCacheLoRAModelManager
from lora_jax.adapters import adapter_from_tensors, load_adapter, save_adapter
from lora_jax.errors import AdapterError

TOKENS = 24
TOLERANCE = 2e-5
"""Of outputs of order 1, float32 against float64."""


def dense(model, x, deltas):
    """Returns one token's output with `deltas` in the dense weights, float64."""
    block = model.block
    wide = {k: np.asarray(v, np.float64) for k, v in _weights(block).items()}
    for role, delta in deltas.items():
        wide[role] = wide[role] + delta
    logits = wide["router"] @ x
    odds = np.exp(logits - logits.max())
    odds /= odds.sum()
    out = np.zeros_like(x)
    for expert in np.argsort(-odds)[: block.top_k]:
        up = wide["up"][expert] @ x + wide["up_bias"][expert]
        if "gate" in wide:
            gate = wide["gate"][expert] @ x + wide["gate_bias"][expert]
            inner = gate / (1 + np.exp(-gate)) * up
        else:
            inner = np.square(np.maximum(up, 0))
        down = wide["down"][expert] @ inner + wide["down_bias"][expert]
        out += odds[expert] * down
    return out


def _weights(block):
    experts = block.experts
    found = {"router": block.gate.kernel[...].T}
    down = experts.down_proj
    found["down"] = jnp.swapaxes(down.kernel[...], 1, 2)
    found["down_bias"] = _bias(down)
    first = experts.gate_up_proj if experts.gated else experts.up_proj
    kernel, bias = jnp.swapaxes(first.kernel[...], 1, 2), _bias(first)
    if not experts.gated:
        return found | {"up": kernel, "up_bias": bias}
    width = kernel.shape[1] // 2
    found |= {"gate": kernel[:, :width], "up": kernel[:, width:]}
    return found | {"gate_bias": bias[:, :width], "up_bias": bias[:, width:]}


def _bias(linear):
    if linear.bias is None:
        return jnp.zeros((linear.num_experts, linear.out_features))
    return linear.bias[...]


CASES = [
    (Sizes(4, 12, 10), 2, 3),
    (Sizes(4, 12, 12), 1, 4),
    (Sizes(8, 16, 8), 4, 2),
    (Sizes(64, 10, 6), 8, 3),
    (Sizes(4, 12, 10, interleaved=True), 2, 3),
]
"""Sizes, experts of a token, rank."""


def _names(sizes):
    """Files of one layout that do not say where it is ambiguous are left to a test."""
    split = {"pairs", "mixtral_names", "some_experts", "own_alphas", "own_ranks"}
    halves = {*split, "shared_outer", "doubled_rank"}
    return [n for n in FILES if not (sizes.interleaved and n in halves - split)]


@pytest.mark.parametrize(("sizes", "top_k", "rank"), CASES)
def test_every_layout_in_one_batch(sizes, top_k, rank):
    model = build(sizes, top_k)
    names = [n for n in _names(sizes) if not _is_ambiguous(n, sizes)]
    made = [
        make(name, sizes, rank, seed=i, adapter_id=i)
        for i, name in enumerate(names, start=1)
    ]
    x = np.random.default_rng(1).standard_normal((TOKENS, sizes.d))
    plain = np.asarray(model(jnp.asarray(x, jnp.float32)))
    manager = serve(model, [adapter for adapter, _ in made])
    ids = np.random.default_rng(2).integers(0, len(made) + 1, TOKENS)
    ids[: len(made) + 1] = np.arange(len(made) + 1)  # every one at least once
    manager.set_adapter_mapping(LoRAMapping(ids.tolist(), []))
    found = np.asarray(model(jnp.asarray(x, jnp.float32)))
    for row, id_ in enumerate(ids):
        deltas = made[id_ - 1][1] if id_ else {}
        expected = dense(model, x[row], deltas)
        np.testing.assert_allclose(found[row], expected, atol=TOLERANCE, rtol=TOLERANCE)
        moved = np.abs(expected - plain[row]).max()
        assert not id_ or moved > 10 * TOLERANCE or _may_be_still(names[id_ - 1])
    np.testing.assert_array_equal(found[ids == 0], plain[ids == 0])


def _is_ambiguous(name, sizes):
    """Whether a file of one parameter, square, tells neither sibling nor version."""
    square = {"down_only": sizes.width, "gate_up_only": 2 * sizes.width}
    return square.get(name.replace("unnamed", "only")) == sizes.d


def _may_be_still(name):
    """Whether a token may choose experts that the file leaves alone."""
    return name in ("some_experts", "router")


@pytest.mark.parametrize(
    ("name", "sizes", "text"),
    [
        ("down_only", Sizes(4, 12, 12), r"square .* write the peft_version"),
        ("gate_up_only", Sizes(4, 24, 12), r"square .* write the peft_version"),
        ("gate_up_unnamed", Sizes(4, 24, 12), r"its shapes fit no parameter here"),
        ("down_only", Sizes(4, 12, 12, True), r"square .* save gate_up_proj and"),
    ],
)
def test_what_nothing_decides_is_refused(name, sizes, text):
    adapter, _ = make(name, sizes, 3, seed=1, adapter_id=1)
    with pytest.raises(AdapterError, match=text):
        serve(build(sizes, 2), [adapter])


@pytest.mark.parametrize("names", [("up_proj", "down_proj"), ("w1", "w2")])
@pytest.mark.parametrize("stacked", [False, True])
def test_experts_without_a_gate(names, stacked):
    """Pairs for each expert, or three-axis factors of all of them."""
    sizes, rank = Sizes(6, 10, 8), 3
    model = build(sizes, 2, gated=False)
    rng = np.random.default_rng(3)
    tensors, deltas = {}, {}
    for name, role, d_in, d_out in (
        (names[0], "up", 10, 8),
        (names[1], "down", 8, 10),
    ):
        a = rng.standard_normal((6, rank, d_in)).astype(np.float32)
        b = rng.standard_normal((6, d_out, rank)).astype(np.float32)
        deltas[role] = (ALPHA / rank) * (b.astype(np.float64) @ a)
        own = {f".{e}": (a[e], b[e]) for e in range(6)}
        for place, (first, second) in ({"": (a, b)} if stacked else own).items():
            module = f"base_model.model.{EXPERTS}{place}.{name}"
            tensors[f"{module}.lora_A.weight"] = first
            tensors[f"{module}.lora_B.weight"] = second
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA}
    adapter = adapter_from_tensors(tensors, config, name="a", adapter_id=1)
    manager = serve(model, [adapter])
    x = rng.standard_normal((7, 10))
    ids = [1, 0, 1, 1, 0, 1, 0]
    manager.set_adapter_mapping(LoRAMapping(ids, []))
    found = np.asarray(model(jnp.asarray(x, jnp.float32)))
    for row, id_ in enumerate(ids):
        expected = dense(model, x[row], deltas if id_ else {})
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found[row], expected, atol=TOLERANCE * scale)


def test_gradients_are_those_of_each_adapter_alone():
    """Of the slot arrays, in a mixed batch; and nothing for a slot without rows."""
    from lora_jax.forward import forward, split

    sizes = Sizes(4, 12, 10)
    model = build(sizes, 2)
    names = ["pairs", "fused", "shared_outer"]
    made = [make(n, sizes, 3, seed=i, adapter_id=i + 1)[0] for i, n in enumerate(names)]
    manager = serve(model, made)
    graphdef, weights = split(model)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((8, 12)), jnp.float32)
    pull = jnp.asarray(rng.standard_normal((8, 12)), jnp.float32)
    ids = np.array([1, 0, 2, 1, 2, 0, 1, 2])  # The third has no rows.

    def factors(bank):
        arrays = {
            f"{name}.{key}": array
            for name, site in bank.arrays.items()
            for key, array in site.items()
            if key in ("a", "b") and "experts" in name
        }
        return arrays

    def loss(found, bank, routing, keep):
        arrays = {
            name: {
                key: found.get(f"{name}.{key}", array) for key, array in site.items()
            }
            for name, site in bank.arrays.items()
        }
        new = type(bank)(arrays, bank.stacked)
        out = forward(graphdef, weights, new, routing, x)
        return jnp.sum(jnp.where(keep[:, None], out * pull, 0))

    def gradient(rows_of):
        ids_here = np.where(np.isin(ids, rows_of), ids, 0)
        manager.set_adapter_mapping(LoRAMapping(ids_here.tolist(), []))
        keep = jnp.asarray(np.isin(ids, rows_of))
        bank = manager.bank
        return jax.grad(loss)(factors(bank), bank, manager.routing, keep)

    mixed, first, second = gradient([1, 2]), gradient([1]), gradient([2])
    for key, array in mixed.items():
        np.testing.assert_allclose(array[0], first[key][0], atol=TOLERANCE)
        np.testing.assert_allclose(array[1], second[key][1], atol=TOLERANCE)
        assert np.abs(array[:2]).max() > 10 * TOLERANCE
        np.testing.assert_array_equal(array[2], 0)


def test_an_adapter_without_experts_leaves_them_bit_for_bit():
    sizes = Sizes(4, 12, 10)
    model = build(sizes, 2)
    adapter, _ = make("router", sizes, 3, seed=1, adapter_id=1)
    # Too small to change who is chosen, and the weights in the last bits only.
    still, _ = make("router", sizes, 3, seed=1, adapter_id=2)
    manager = serve(model, [adapter, still])
    x = jnp.asarray(np.random.default_rng(1).standard_normal((6, 12)), jnp.float32)
    chosen = jnp.asarray(np.random.default_rng(2).integers(0, 4, (6, 2)), jnp.int32)
    weights = jnp.full((6, 2), 0.5)
    plain = model.block.experts(x, chosen, weights)
    manager.set_adapter_mapping(LoRAMapping([1, 0, 2, 1, 0, 2], []))
    np.testing.assert_array_equal(model.block.experts(x, chosen, weights), plain)


def test_no_other_mix_of_adapters_or_experts_compiles_again():
    from lora_jax.forward import forward, split

    sizes = Sizes(4, 12, 10)
    model = build(sizes, 2)
    made = [make(n, sizes, 3, seed=i, adapter_id=i + 1)[0] for i, n in enumerate(FILES)]
    manager = LRUCacheLoRAModelManager(
        model, LoRAConfig(max_loras=2, max_cpu_loras=len(made), max_lora_rank=16)
    )
    graphdef, weights = split(model)
    traces = []

    @jax.jit
    def step(weights, bank, routing, x):
        traces.append(1)
        return forward(graphdef, weights, bank, routing, x)

    x = np.random.default_rng(1).standard_normal((6, 12)).astype(np.float32)
    for adapter in made:
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)
        manager.set_adapter_mapping(LoRAMapping([0, adapter.id] * 3, []))
        step(weights, manager.bank, manager.routing, x * adapter.id)
    assert len(traces) == 1
    assert step._cache_size() == 1


FAULTS = [
    (f"{EXPERTS}.9.gate_proj", (3, 12), (10, 3), "not a module that this model"),
    (f"{EXPERTS}.1.gate_proj", (3, 11), (10, 3), "lora_A has input width 11, an ex"),
    (f"{EXPERTS}.1.gate_proj", (3, 12), (9, 3), "lora_B has output width 9, an exp"),
    (f"{EXPERTS}.1.down_proj", (17, 10), (12, 17), "rank 17 exceeds max_lora_rank=16"),
    (f"{EXPERTS}.w1", (4, 17, 12), (4, 10, 17), "rank 17 exceeds max_lora_rank=16"),
    (f"{EXPERTS}.w1", (5, 3, 12), (1, 10, 3), r"lora_A has shape \(5, 3, 12\)"),
    (f"{EXPERTS}.w9", (3, 12), (10, 3), "not a module that this model can adapt"),
    (EXPERTS, (15, 13), (20, 15), "target_parameters does not name it, and its sha"),
    (f"{EXPERTS}.base_layer", (12, 13), (20, 12), r"have widths \(13, 20\)"),
    (f"{EXPERTS}.base_layer", (15, 12), (20, 15), "15 rows, the layer's 4 experts"),
]


@pytest.mark.parametrize(("module", "a", "b", "text"), FAULTS)
def test_what_does_not_fit_is_refused_by_name(module, a, b, text):
    tensors = {
        f"base_model.model.{module}.lora_A.weight": np.ones(a, np.float32),
        f"base_model.model.{module}.lora_B.weight": np.ones(b, np.float32),
    }
    rank = 17 if 17 in a else 3
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA}
    adapter = adapter_from_tensors(tensors, config, name="a", adapter_id=1)
    with pytest.raises(AdapterError, match=text) as caught:
        serve(build(Sizes(4, 12, 10), 2), [adapter])
    assert module in str(caught.value)


@pytest.mark.parametrize("layout", ["pairs", "lists_of_experts"])
def test_experts_held_here_must_have_been_read(layout, tmp_path):
    sizes = Sizes(4, 12, 10)
    whole, _ = make(layout, sizes, 3, seed=1, adapter_id=1)
    folder = save_adapter(whole, tmp_path)
    part = load_adapter(folder, adapter_id=1, local_experts=range(1, 3))
    with pytest.raises(AdapterError, match=r"range\(1, 3\) alone, .* holds 0 to 3 too"):
        serve(build(sizes, 2), [part])
    serve(build(sizes, 2), [load_adapter(folder, 2, local_experts=range(4))])


def test_an_expert_that_the_model_has_not_is_told_by_number():
    sizes = Sizes(4, 12, 10)
    adapter, _ = make("pairs", Sizes(5, 12, 10), 3, seed=1, adapter_id=1)
    with pytest.raises(AdapterError, match="experts are numbered 0 to 3") as caught:
        serve(build(sizes, 2), [adapter])
    text = str(caught.value)
    assert "experts.4.gate_proj: not a module that this model can adapt." in text
    assert "has *.down_proj, *.gate_proj" in text


def test_two_layouts_of_one_expert_in_one_file_are_refused():
    sizes = Sizes(4, 12, 10)
    rng = np.random.default_rng(0)
    first, second = FILES["fused"](rng, sizes, 3), FILES["pairs"](rng, sizes, 3)
    one = f"{EXPERTS}.2.up_proj"
    extra = {n: t for n, t in second.tensors.items() if n.startswith(one)}
    tensors = {**first.tensors, **extra}
    tensors = {f"base_model.model.{name}": array for name, array in tensors.items()}
    config = {"peft_type": "LORA", "lora_alpha": ALPHA, **first.config}
    adapter = adapter_from_tensors(tensors, config, name="a", adapter_id=1)
    with pytest.raises(AdapterError, match=r"has this place too"):
        serve(build(sizes, 2), [adapter])


def test_the_slot_arrays_are_the_documented_ones():
    model = build(Sizes(4, 12, 10), 2)
    manager = LRUCacheLoRAModelManager(model, LoRAConfig(max_loras=3, max_lora_rank=8))
    shapes = {
        name: {key: array.shape for key, array in arrays.items()}
        for name, arrays in manager.bank.arrays.items()
    }
    assert shapes[f"{EXPERTS}.gate_up_proj"] == {
        "a": (3, 4, 2, 8, 12),
        "b": (3, 4, 8, 20),
        "scale": (3, 4, 2),
        "rank": (3, 4, 2),
    }
    assert shapes[f"{EXPERTS}.down_proj"]["a"] == (3, 4, 1, 8, 10)
    assert shapes[f"{EXPERTS}.down_proj"]["b"] == (3, 4, 8, 12)
    assert shapes[f"{BLOCK}.gate"]["a"] == (3, 1, 8, 12)


@pytest.mark.parametrize("target", ["experts", "gate_up_proj", "w1", "up_proj"])
def test_target_modules_choose_experts_by_every_name(target):
    model = build(Sizes(4, 12, 10), 2)
    config = LoRAConfig(target_modules=[target])
    names = set(LRUCacheLoRAModelManager(model, config).sites)
    down = {f"{EXPERTS}.down_proj"} if target == "experts" else set()
    assert names == {f"{EXPERTS}.gate_up_proj"} | down


def test_another_number_of_rows_is_refused():
    sizes = Sizes(4, 12, 10)
    model = build(sizes, 2)
    adapter, _ = make("fused", sizes, 3, seed=1, adapter_id=1)
    manager = serve(model, [adapter])
    manager.set_adapter_mapping(LoRAMapping([1, 0, 1, 1, 1], []))
    x = jnp.ones((4, 12))
    chosen = jnp.zeros((4, 2), jnp.int32)
    with pytest.raises(ValueError, match="names 5 rows, but the layer sees 8 pairs"):
        model.block.experts(x, chosen, jnp.ones((4, 2)))


def test_dummies_cover_the_experts():
    model = build(Sizes(4, 12, 10), 2)
    manager = LRUCacheLoRAModelManager(model, LoRAConfig(max_loras=1))
    dummy = manager.create_dummy_lora(1, rank=4)
    assert set(dummy.parts) == {
        f"{EXPERTS}.gate_up_proj",
        f"{EXPERTS}.down_proj",
        f"{BLOCK}.gate",
    }
    manager.add_adapter(dummy)
    manager.activate_adapter(1)
    ranks = manager.bank.arrays[f"{EXPERTS}.gate_up_proj"]["rank"]
    np.testing.assert_array_equal(ranks, np.full((1, 4, 2), 4))
