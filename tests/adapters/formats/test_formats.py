"""Files of other frameworks mean what their frameworks mean by them."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from adapter_files import INNER, WIDTH, Q, normal, pairs
from lora_jax.adapters import (
    DoRA,
    EmbeddingLowRank,
    LowRank,
    adapter_from_tensors,
    load_adapter,
    save_adapter,
)
from lora_jax.errors import AdapterError

RNG = np.random.default_rng(3)
X = normal(RNG, 5, WIDTH).astype(np.float64)
UP = "model.layers.1.mlp.up_proj"
HEADS, HEAD_DIM, RANK = 4, 8, 3
BASE = {"model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": 2}


def delta(part, x=X):
    return part.scale * (x @ part.a.T) @ part.b.T


MLX_CONFIG = {
    "fine_tune_type": "lora",
    "num_layers": 16,
    "model": "some/base",
    "lora_parameters": {"rank": RANK, "scale": 20.0, "dropout": 0.0},
}
MLX = {
    f"{Q}.lora_a": normal(RNG, WIDTH, RANK),
    f"{Q}.lora_b": normal(RNG, RANK, WIDTH),
    f"{UP}.lora_a": normal(RNG, WIDTH, RANK),
    f"{UP}.lora_b": normal(RNG, RANK, INNER),
}


def test_mlx_multiplies_by_scale_itself(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(MLX_CONFIG))
    save_file(MLX, tmp_path / "adapters.safetensors")
    save_file(MLX, tmp_path / "0000100_adapters.safetensors")
    adapter = load_adapter(tmp_path)
    for module in (Q, UP):
        expected = 20.0 * (X @ MLX[f"{module}.lora_a"]) @ MLX[f"{module}.lora_b"]
        np.testing.assert_allclose(delta(adapter.parts[module]), expected, rtol=1e-12)
    assert adapter.base_model == "some/base"
    assert adapter.report.notes[0] == "converted from MLX-LM's format"
    assert adapter.report.modules[0].tensors == (f"{Q}.lora_a", f"{Q}.lora_b")


def mlx(tensors, **fields):
    return adapter_from_tensors(tensors, MLX_CONFIG | fields, name="a")


def test_mlx_dora_embedding_and_default_scale():
    tensors = MLX | {f"{Q}.m": normal(RNG, WIDTH), f"{UP}.m": normal(RNG, INNER)}
    adapter = mlx(tensors, fine_tune_type="dora", lora_parameters={"rank": RANK})
    assert isinstance(adapter.parts[Q], DoRA)
    assert adapter.parts[Q].update.scale == 20.0
    table = {
        "model.embed_tokens.lora_a": normal(RNG, 100, RANK),
        "model.embed_tokens.lora_b": normal(RNG, RANK, WIDTH),
    }
    part = mlx(MLX | table).parts["model.embed_tokens"]
    assert isinstance(part, EmbeddingLowRank)
    rows = table["model.embed_tokens.lora_a"] @ table["model.embed_tokens.lora_b"]
    np.testing.assert_allclose(part.scale * (part.b @ part.a).T, 20 * rows, rtol=1e-5)


def test_mlx_modules_may_differ_in_rank():
    wide = {
        f"{UP}.lora_a": normal(RNG, WIDTH, 7),
        f"{UP}.lora_b": normal(RNG, 7, INNER),
    }
    parts = mlx(MLX | wide, lora_parameters={"scale": 1 / 3}).parts
    assert {m: (p.rank, p.scale) for m, p in parts.items()} == {
        Q: (RANK, 1 / 3),
        UP: (7, 1 / 3),
    }


def turn_to_meta(rows):
    """Rows of one head, half by half (Hugging Face) -> two by two (Meta)."""
    half = len(rows) // 2
    turned = np.empty_like(rows)
    for i in range(half):
        turned[2 * i], turned[2 * i + 1] = rows[i], rows[half + i]
    return turned


def all_heads_to_meta(array, heads):
    return np.concatenate([turn_to_meta(part) for part in np.split(array, heads)])


def tune_tensors():
    """Returns the PEFT values by module, and torchtune's file of them."""
    peft, native = {}, {}
    names = {
        "self_attn.q_proj": ("attn.q_proj", WIDTH, HEADS),
        "self_attn.k_proj": ("attn.k_proj", WIDTH // 2, 2),
        "self_attn.v_proj": ("attn.v_proj", WIDTH // 2, 0),
        "self_attn.o_proj": ("attn.output_proj", WIDTH, 0),
        "mlp.gate_proj": ("mlp.w1", WIDTH, 0),
        "mlp.up_proj": ("mlp.w3", WIDTH, 0),
        "mlp.down_proj": ("mlp.w2", WIDTH, 0),
    }
    for module, (name, d_out, heads) in names.items():
        a, b = normal(RNG, 4, WIDTH), normal(RNG, d_out, 4)
        peft[f"model.layers.0.{module}"] = (a, b)
        native[f"layers.0.{name}.lora_a.weight"] = a
        turned = all_heads_to_meta(b, heads) if heads else b
        native[f"layers.0.{name}.lora_b.weight"] = turned
    peft["lm_head"] = (normal(RNG, 4, WIDTH), normal(RNG, 100, 4))
    native["output.lora_a.weight"], native["output.lora_b.weight"] = peft["lm_head"]
    return peft, native


TUNE_CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def test_torchtune_rows_of_q_and_k_are_reordered():
    peft, native = tune_tensors()
    adapter = adapter_from_tensors(native, TUNE_CONFIG, name="a", base_config=BASE)
    assert adapter.parts.keys() == peft.keys()
    for module, (a, b) in peft.items():
        np.testing.assert_array_equal(adapter.parts[module].a, a)
        np.testing.assert_array_equal(adapter.parts[module].b, b)
        assert adapter.parts[module].scale == 2.0


def test_torchtune_magnitudes_are_reordered_too():
    magnitude = normal(RNG, WIDTH)
    native = {
        "layers.0.attn.q_proj.lora_a.weight": normal(RNG, 4, WIDTH),
        "layers.0.attn.q_proj.lora_b.weight": normal(RNG, WIDTH, 4),
        "layers.0.attn.q_proj.magnitude": all_heads_to_meta(magnitude, HEADS),
    }
    adapter = adapter_from_tensors(native, TUNE_CONFIG, name="a", base_config=BASE)
    np.testing.assert_array_equal(adapter.parts[Q].magnitude, magnitude)


def test_torchtune_takes_the_heads_from_the_base_it_names(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "a").mkdir()
    fields = TUNE_CONFIG | {"base_model_name_or_path": str(tmp_path / "base")}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(fields))
    peft, native = tune_tensors()
    save_file(native, tmp_path / "a" / "adapter_model.safetensors")
    part = load_adapter(tmp_path / "a").parts[Q]
    np.testing.assert_array_equal(part.b, peft[Q][1])
    with pytest.raises(AdapterError, match="must be reordered by head"):
        load_adapter("a", root=tmp_path)


def test_torchtune_qwen_is_in_peft_order():
    _, native = tune_tensors()
    qwen = {"model_type": "qwen2"}
    adapter = adapter_from_tensors(native, TUNE_CONFIG, name="a", base_config=qwen)
    expected = native["layers.0.attn.q_proj.lora_b.weight"]
    np.testing.assert_array_equal(adapter.parts[Q].b, expected)


def kohya(name, alpha=None, rank=RANK):
    tensors = {
        f"{name}.lora_down.weight": normal(RNG, rank, WIDTH),
        f"{name}.lora_up.weight": normal(RNG, WIDTH, rank),
    }
    return (
        tensors
        if alpha is None
        else tensors | {f"{name}.alpha": np.array(alpha, np.float32)}
    )


KOHYA = [
    (
        "lora_te_text_model_encoder_layers_3_mlp_fc2",
        "text_model.encoder.layers.3.mlp.fc2",
    ),
    (
        "lora_te1_text_model_encoder_layers_3_self_attn_q_proj",
        "text_model.encoder.layers.3.self_attn.q_proj",
    ),
    ("lora_te_model_layers_11_self_attn_q_proj", "model.layers.11.self_attn.q_proj"),
    ("lora_llm_layers_1_mlp_gate_proj", "layers.1.mlp.gate_proj"),
    (f"text_encoder.{Q}", Q),
    (Q, Q),
]


@pytest.mark.parametrize(("name", "module"), KOHYA)
def test_kohya_divides_alpha_by_each_modules_own_rank(name, module):
    tensors = kohya(name, 6.0) | kohya("model.layers.9.mlp.up_proj", rank=5)
    adapter = adapter_from_tensors(tensors, {}, name="a")
    assert adapter.parts[module].scale == 2.0
    assert adapter.parts["model.layers.9.mlp.up_proj"].scale == 1.0
    assert (adapter.report.total, adapter.report.matched) == (5, 4)
    (ignored,) = adapter.report.ignored
    assert ignored.reason == f"read as alpha of {module}"
    expected = 2.0 * (X @ tensors[f"{name}.lora_down.weight"].T)
    expected = expected @ tensors[f"{name}.lora_up.weight"].T
    np.testing.assert_allclose(delta(adapter.parts[module]), expected, rtol=1e-12)


def test_kohya_order_of_keys_makes_no_difference():
    tensors = kohya("a", rank=2) | kohya("b", 8, rank=4) | kohya("c", rank=8)
    scales = [
        {m: p.scale for m, p in adapter_from_tensors(t, {}, name="a").parts.items()}
        for t in (tensors, dict(reversed(tensors.items())))
    ]
    assert scales[0] == scales[1] == {"a": 1.0, "b": 2.0, "c": 1.0}


def test_a_weights_file_alone_is_enough_where_no_config_is_needed(tmp_path):
    save_file(kohya(Q, 6.0), tmp_path / "style.safetensors")
    adapter = load_adapter(tmp_path / "style.safetensors")
    assert (adapter.name, adapter.parts[Q].scale) == ("style", 2.0)
    save_file(pairs(), tmp_path / "peft.safetensors")
    with pytest.raises(AdapterError, match="lora_alpha is missing"):
        load_adapter(tmp_path / "peft.safetensors")


TUNIX = {
    "layers.0.attn.q_proj.w_lora_a": normal(RNG, WIDTH, RANK),
    "layers.0.attn.q_proj.w_lora_b": normal(RNG, RANK, HEADS, HEAD_DIM),
    "layers.0.attn.o_proj.w_lora_a": normal(RNG, HEADS, HEAD_DIM, RANK),
    "layers.0.attn.o_proj.w_lora_b": normal(RNG, RANK, WIDTH),
    "layers.0.mlp.gate_proj.kernel_lora_a": normal(RNG, WIDTH, RANK),
    "layers.0.mlp.gate_proj.kernel_lora_b": normal(RNG, RANK, INNER),
}


@pytest.mark.parametrize("separator", [".", "/"])
def test_tunix_leaves_are_turned_and_their_heads_joined(separator):
    tensors = {name.replace(".", separator): a for name, a in TUNIX.items()}
    adapter = adapter_from_tensors(tensors, {"rank": RANK, "alpha": 6.0}, name="a")
    q_a, q_b, o_a, o_b, gate_a, gate_b = TUNIX.values()
    heads = np.einsum("td,dr,rhk->thk", X, q_a, q_b)
    found = delta(adapter.parts[Q])
    np.testing.assert_allclose(found, 2 * heads.reshape(5, -1), rtol=1e-6)
    by_head = X.reshape(5, HEADS, HEAD_DIM)
    expected = 2 * np.einsum("thk,hkr,rd->td", by_head, o_a, o_b)
    o_proj = adapter.parts["model.layers.0.self_attn.o_proj"]
    np.testing.assert_allclose(delta(o_proj), expected, rtol=1e-6)
    gate = adapter.parts["model.layers.0.mlp.gate_proj"]
    np.testing.assert_allclose(delta(gate), 2 * X @ gate_a @ gate_b, rtol=1e-6)


UNSLOTH = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True},
    "target_modules": r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj).*?)",
    "lora_ga_config": None,
    "some_newer_field": None,
}
FACTORY = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj", "up_proj"],
    "modules_to_save": ["lm_head", "embed_tokens"],
}
AXOLOTL = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "rank_pattern": {},
    "lora_dropout": 0.05,
    "target_modules": ["q_proj"],
}


@pytest.mark.parametrize("fields", [UNSLOTH, FACTORY, AXOLOTL])
def test_tools_that_write_peft_with_habits_are_read(fields):
    tensors = pairs() | {"base_model.model.lm_head.weight": normal(RNG, 104, WIDTH)}
    adapter = adapter_from_tensors(tensors, fields, name="a")
    assert adapter.kinds == {"lora", "full_module"}
    assert adapter.parts["lm_head"].weight.shape == (104, WIDTH)


CASES = [
    (MLX, MLX_CONFIG | {"fine_tune_type": "full"}, "only lora and dora are adapters"),
    (MLX, MLX_CONFIG | {"lora_parameters": {"scale": "x"}}, "must be a number"),
    (MLX | {f"{Q}.what": X}, MLX_CONFIG, "what"),
    (
        {f"{Q}.lora_a": normal(RNG, 4, 8, 3), f"{Q}.lora_b": normal(RNG, 4, 3, 8)},
        MLX_CONFIG,
        "expected two axes",
    ),
    (
        {"embed_tokens.lora_a": X, "embed_tokens.lora_b": X, "embed_tokens.m": X[0]},
        MLX_CONFIG,
        "DoRA of an embedding is not PEFT's",
    ),
    (
        tune_tensors()[1],
        TUNE_CONFIG,
        "number|rows must be reordered by head, and the base model's config is not",
    ),
    (
        {"layers.0.attn.kv_proj.lora_a.weight": normal(RNG, 4, 4)},
        TUNE_CONFIG,
        r"attn\.kv_proj",
    ),
    (kohya(Q) | {f"{Q}.dora_scale": X}, {}, "dora_scale"),
    (kohya(Q) | {f"{Q}.lora_mid.weight": X}, {}, "lora_mid"),
    (kohya(Q) | {f"{Q}.alpha": X}, {}, "expected one number"),
    (
        kohya(Q) | {f"{UP}.alpha": np.ones((), np.float32)},
        {},
        "an alpha and no lora_down",
    ),
    (kohya(Q, np.nan), {}, "alpha is no finite number"),
    (kohya(Q) | kohya(f"text_encoder.{Q}"), {}, "has the same meaning"),
    (
        TUNIX | {"layers.0.attn.kv_einsum.w_lora_a": X},
        {"rank": 3, "alpha": 6},
        "kv_einsum",
    ),
    (TUNIX, {"rank": 3}, "lora_alpha is missing"),
    (TUNIX, {"rank": 5, "alpha": 5}, "the config declares 5"),
    (
        TUNIX | {"layers.1.attn.q_proj.w_lora_a": X[0]},
        {"rank": 3, "alpha": 6},
        "expected 2 or 3 axes",
    ),
]


@pytest.mark.parametrize(("tensors", "fields", "text"), CASES, ids=range(len(CASES)))
def test_what_has_no_meaning_in_peft_is_refused_by_name(tensors, fields, text):
    with pytest.raises(AdapterError, match=text):
        adapter_from_tensors(tensors, fields, name="a")


def test_rows_that_are_not_whole_heads_are_refused():
    base = BASE | {"num_attention_heads": 5}
    _, native = tune_tensors()
    with pytest.raises(AdapterError, match="32 rows are not 5 heads of even width"):
        adapter_from_tensors(native, TUNE_CONFIG, name="a", base_config=base)


SOURCES = {
    "mlx": (MLX, MLX_CONFIG),
    "kohya": (kohya(Q, 5.0), {}),
    "tunix": (TUNIX, {"rank": RANK, "alpha": 5.0}),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_format_is_written_back_as_peft(tmp_path, source):
    tensors, fields = SOURCES[source]
    adapter = adapter_from_tensors(tensors, fields, name="a")
    again = load_adapter(save_adapter(adapter, tmp_path))
    assert again.content_hash == adapter.content_hash
    assert all(isinstance(part, LowRank) for part in again.parts.values())
