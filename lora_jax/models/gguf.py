"""A GGUF file of a Llama-architecture model turned into a Hugging Face folder.

GGUF keeps q and k with each head's rotary pairs side by side; Hugging Face keeps first
halves before second halves, so their rows are put back. Quantised tensors become
float32: GGUF defines `scale * code + offset` in that dtype, and float16 scales times
codes do not fit a smaller one.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's
`convert_hf_to_gguf.py` (`LlamaModel.permute`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lora_jax.errors import ModelError, faults
from lora_jax.models.gguf_tokenizer import Look, write_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

ARCHITECTURE = "llama"

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""GGUF's name -> Hugging Face's, outside the layers."""

LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
"""The same inside a layer, after `blk.N.` and `model.layers.N.`."""

CONFIG_KEYS = {
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.rope.dimension_count",
    "max_position_embeddings": "llama.context_length",
    "rope_theta": "llama.rope.freq_base",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "vocab_size": "llama.vocab_size",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
"""config.json's key -> GGUF's."""


def convert_gguf(file: Path, folder: Path) -> None:
    """Writes config, weights and tokenizer of a GGUF file into an existing folder.

    Args:
      file: a GGUF file of architecture `llama` with a byte-level BPE tokenizer.
      folder: gets config.json, generation_config.json, model.safetensors (float32),
        tokenizer.json and tokenizer_config.json.

    Raises:
      ModelError: if the file has another architecture, a tensor that this conversion
        does not know, or lacks metadata; the text names every fault.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{file} is not a readable GGUF file: {error}") from error
    look = _metadata(reader)
    if look("general.architecture") != ARCHITECTURE:
        raise ModelError(
            f"{file}: architecture {look('general.architecture')!r}, only "
            f"{ARCHITECTURE!r} can be converted; use the Hugging Face checkpoint"
        )
    config = _config(file, look)
    names = _names(file, reader)
    tied = "lm_head.weight" not in names
    weights = {
        name: _tensor(name, tensor, config)
        for name, tensor in zip(names, reader.tensors, strict=True)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", {**config, "tie_word_embeddings": tied})
    special = {key: config[key] for key in config if key.endswith("_token_id")}
    _write(folder / "generation_config.json", special)
    write_tokenizer(look, folder, origin=str(file))


def _metadata(reader: "GGUFReader") -> Look:
    def look_up(key: str) -> object:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    return look_up


def _config(file: Path, look: Look) -> dict[str, object]:
    found = {key: look(source) for key, source in CONFIG_KEYS.items()}
    missing = [CONFIG_KEYS[key] for key, value in found.items() if value is None]
    if missing:
        raise ModelError(f"{file} lacks metadata: {', '.join(missing)}")
    # GGUF keeps float32; 1e-5 comes back as 9.99999974e-06 without this.
    shortened = {
        key: float(str(np.float32(value))) if isinstance(value, float) else value
        for key, value in found.items()
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **shortened,
    }


def _names(file: Path, reader: "GGUFReader") -> list[str]:
    names, unknown = [], []
    for tensor in reader.tensors:
        name = _name(tensor.name)
        names.append(name or "")
        if name is None:
            unknown.append(f"{tensor.name}: no such tensor in a {ARCHITECTURE} model")
    if unknown:
        raise ModelError(faults(f"{file} cannot be converted:", unknown))
    return names


def _name(gguf_name: str) -> str | None:
    """Returns Hugging Face's name of a GGUF tensor."""
    if not gguf_name.startswith("blk."):
        return TENSOR_NAMES.get(gguf_name)
    _, layer, rest = gguf_name.split(".", 2)
    inner = LAYER_NAMES.get(rest)
    return None if inner is None else f"model.layers.{layer}.{inner}"


def _tensor(
    name: str, tensor: "ReaderTensor", config: Mapping[str, object]
) -> np.ndarray:
    from gguf import dequantize

    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    module = name.split(".")[-2]
    if module not in heads:
        return np.ascontiguousarray(values)
    count = config[heads[module]]
    assert isinstance(count, int)
    return unpermute(values, count)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Returns q or k rows in Hugging Face's order: first halves, then second halves.

    Args:
      weight: `(heads * head_dim, d_in)`, each head's rows interleaved as pairs.
      heads: number of heads that the rows make up.
    """
    rows, d_in = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, d_in)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, d_in))


def _write(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
