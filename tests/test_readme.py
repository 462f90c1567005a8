"""Runs the README's Python, word for word, on a tiny model and two adapters."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
WIDTH, LAYERS, VOCAB = 16, 2, 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYER = {
    "input_layernorm.weight": (WIDTH,),
    "post_attention_layernorm.weight": (WIDTH,),
    "self_attn.q_proj.weight": (16, WIDTH),
    "self_attn.k_proj.weight": (8, WIDTH),
    "self_attn.v_proj.weight": (8, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, 16),
    "mlp.gate_proj.weight": (24, WIDTH),
    "mlp.up_proj.weight": (24, WIDTH),
    "mlp.down_proj.weight": (WIDTH, 24),
}
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory that the README speaks of."""
    _write_model(tmp_path / "path/to/model")
    for seed, name in enumerate(("sql", "poet"), start=1):
        _write_adapter(tmp_path / "adapters" / name, seed)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_of_the_readme_runs_and_each_row_differs(folder):
    names: dict[str, object] = {}
    exec(BLOCKS[0], names)
    sql, poet, base = np.asarray(names["logits"])
    assert names["logits"].shape == (3, 3, VOCAB)
    for one, other in ((sql, base), (poet, base), (sql, poet)):
        assert np.abs(one - other).max() > 1e-3


def test_the_jitted_example_of_the_readme_gives_the_same(folder):
    names: dict[str, object] = {}
    exec(BLOCKS[0], names)
    plain = np.asarray(names["logits"])
    exec(BLOCKS[1], names)
    np.testing.assert_allclose(np.asarray(names["logits"]), plain, atol=1e-5)


def test_the_example_is_at_most_ten_lines():
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 10


def _write_model(folder: Path) -> None:
    random = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": s for name, s in LAYER.items()}
    tensors = {
        name: random.normal(size=shape).astype(np.float32) / 4
        for name, shape in shapes.items()
    }
    _write(folder, "config.json", CONFIG, "model.safetensors", tensors)


def _write_adapter(folder: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight": (
            random.normal(size=shape).astype(np.float32)
        )
        for layer in range(LAYERS)
        for half, shape in {"A": (2, WIDTH), "B": (16, 2)}.items()
    }
    _write(folder, "adapter_config.json", ADAPTER, "adapter_model.safetensors", tensors)


def _write(
    folder: Path,
    config_name: str,
    config: dict[str, object],
    tensors_name: str,
    tensors: dict[str, np.ndarray],
) -> None:
    folder.mkdir(parents=True)
    (folder / config_name).write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / tensors_name)
