"""A tiny random Llama, adapters for it, and what each row must answer, in float64.

The oracle is NumPy alone: it merges one adapter into dense float64 weights and computes
the whole sequence anew for every token.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.adapters import Adapter, LowRank, adapter_from_tensors
from lora_jax.models import CausalLM, ModelConfig, config_from_dict

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}

SIZES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (32, 16),
    "self_attn.v_proj": (32, 16),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (32, 48),
    "mlp.up_proj": (32, 48),
    "mlp.down_proj": (48, 32),
}
"""Projection -> input and output width."""

ALL = tuple(SIZES)
SHARPNESS = 6.0
"""Factor on the random embeddings: logits spread, so that greedy choices are clear."""


def tiny_config(**changes: object) -> ModelConfig:
    return config_from_dict({**CONFIG, **changes}, origin="tiny")


def tiny_model(**changes: object) -> CausalLM:
    """Returns the model; the same weights at every call."""
    model = CausalLM(tiny_config(**changes), dtype="float32", rngs=nnx.Rngs(0))
    table = model.model.embed_tokens.embedding
    table.set_value(table[...] * SHARPNESS)
    return model


def adapter_tensors(
    seed: int, rank: int, targets: Sequence[str] = ALL
) -> dict[str, np.ndarray]:
    """PEFT's tensors of a random adapter whose effect is large; B is not zero."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for target in targets:
            d_in, d_out = SIZES[target]
            key = f"base_model.model.model.layers.{layer}.{target}"
            a = rng.normal(size=(rank, d_in)) / np.sqrt(d_in)
            b = rng.normal(size=(d_out, rank)) / np.sqrt(rank)
            tensors[f"{key}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{key}.lora_B.weight"] = b.astype(np.float32)
    return tensors


def adapter_config(rank: int, targets: Sequence[str] = ALL) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(target.rpartition(".")[2] for target in targets),
    }


def tiny_adapter(name: str, seed: int, rank: int = 4, targets=ALL) -> Adapter:
    tensors, config = (
        adapter_tensors(seed, rank, targets),
        adapter_config(rank, targets),
    )
    return adapter_from_tensors(tensors, config, name=name)


def write_adapter(folder, seed: int, rank: int = 4, targets=ALL):
    """Writes the adapter as PEFT does and returns the folder."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        adapter_tensors(seed, rank, targets), folder / "adapter_model.safetensors"
    )
    config = json.dumps(adapter_config(rank, targets))
    (folder / "adapter_config.json").write_text(config)
    return folder


class Oracle:
    """The model as dense float64 weights, read before it is wrapped."""

    def __init__(self, model: CausalLM) -> None:
        self.embedding = _float64(model.model.embed_tokens.embedding)
        self.norm = _float64(model.model.norm.scale)
        self.layers = [_layer_weights(layer) for layer in model.model.layers]

    def logits(self, tokens: Sequence[int], adapter: Adapter | None) -> np.ndarray:
        """Returns `(time, vocab)` float64 logits."""
        x = self.embedding[np.asarray(tokens)]
        for index, layer in enumerate(self.layers):
            weights = _merged(layer, index, adapter)
            normed = _rms(x, weights["input_layernorm"])
            x = x + _attention(normed, weights) @ weights["self_attn.o_proj"]
            normed = _rms(x, weights["post_attention_layernorm"])
            gate = normed @ weights["mlp.gate_proj"]
            up = normed @ weights["mlp.up_proj"]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ weights["mlp.down_proj"]
        head, pair = self.embedding, adapter and adapter.parts.get("lm_head")
        if isinstance(pair, LowRank):
            head = head + pair.scale * pair.b.astype(np.float64) @ pair.a
        return _rms(x, self.norm) @ head.T

    def greedy(self, prompt: Sequence[int], adapter: Adapter | None, count: int):
        """Returns the next `count` greedy tokens."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens, adapter)[-1].argmax()))
        return tuple(tokens[len(prompt) :])

    def prompt_logprobs(self, prompt: Sequence[int], adapter: Adapter | None):
        """Returns the log-probability of prompt tokens 1, 2, ..."""
        logits = self.logits(prompt, adapter)[:-1]
        peak = logits.max(-1, keepdims=True)
        logs = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
        return logs[np.arange(len(prompt) - 1), np.asarray(prompt[1:], int)]


def _float64(variable) -> np.ndarray:
    return np.asarray(jnp.asarray(variable[...]), np.float64)


def _layer_weights(layer) -> dict[str, np.ndarray]:
    q, k, v = np.split(_float64(layer.self_attn.qkv_proj.kernel), [32, 48], axis=1)
    gate, up = np.split(_float64(layer.mlp.gate_up_proj.kernel), 2, axis=1)
    return {
        "input_layernorm": _float64(layer.input_layernorm.scale),
        "post_attention_layernorm": _float64(layer.post_attention_layernorm.scale),
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.o_proj": _float64(layer.self_attn.o_proj.kernel),
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": _float64(layer.mlp.down_proj.kernel),
    }


def _merged(
    layer: Mapping[str, np.ndarray], index: int, adapter: Adapter | None
) -> dict[str, np.ndarray]:
    weights = dict(layer)
    for target in SIZES if adapter is not None else ():
        pair = adapter.parts.get(f"model.layers.{index}.{target}")
        if pair is not None:
            update = pair.a.astype(np.float64).T @ pair.b.astype(np.float64).T
            weights[target] = weights[target] + pair.scale * update
    return weights


def _rms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    mean = (x**2).mean(-1, keepdims=True)
    return x / np.sqrt(mean + CONFIG["rms_norm_eps"]) * scale


def _attention(x: np.ndarray, weights: Mapping[str, np.ndarray]) -> np.ndarray:
    time, heads, kv_heads, width = len(x), 4, 2, 8
    q = _rotated((x @ weights["self_attn.q_proj"]).reshape(time, heads, width))
    k = _rotated((x @ weights["self_attn.k_proj"]).reshape(time, kv_heads, width))
    v = (x @ weights["self_attn.v_proj"]).reshape(time, kv_heads, width)
    k, v = (np.repeat(array, heads // kv_heads, axis=1) for array in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width)
    scores[:, np.triu(np.ones((time, time), bool), 1)] = -np.inf
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", chances, v).reshape(time, heads * width)


def _rotated(x: np.ndarray) -> np.ndarray:
    time, _, width = x.shape
    frequencies = CONFIG["rope_theta"] ** (-np.arange(0, width, 2) / width)
    angles = np.arange(time)[:, None, None] * np.tile(frequencies, 2)
    left, right = np.split(x, 2, axis=-1)
    return x * np.cos(angles) + np.concatenate([-right, left], -1) * np.sin(angles)


WORDS = ["<eos>", *(f"w{index}" for index in range(1, CONFIG["vocab_size"]))]
"""The tokenizer's words; a word's number is its token id."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}w1{% endif %}"
)


def write_model(folder: Path) -> Path:
    """Writes the model and a tokenizer of `WORDS` as a Hugging Face folder."""
    import tokenizers
    from safetensors.numpy import save_file

    oracle = Oracle(tiny_model())
    tensors = {
        "model.embed_tokens.weight": oracle.embedding,
        "model.norm.weight": oracle.norm,
    }
    for index, layer in enumerate(oracle.layers):
        for name, weight in layer.items():
            tensors[f"model.layers.{index}.{name}.weight"] = weight.T
    folder.mkdir(parents=True)
    save_file(
        {
            name: np.ascontiguousarray(weight, np.float32)
            for name, weight in tensors.items()
        },
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 0}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, "w2")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    return folder
