"""A small GGUF file of known weights becomes the folder that they came from."""

import json

import gguf
import numpy as np
import pytest

from lora_jax.errors import ModelError
from lora_jax.models import load_model, load_tokenizer
from lora_jax.models.gguf import LAYER_NAMES, convert_gguf, unpermute

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 4, 2, 8
TOKENS = ["<|end|>", "<|user|>", "1", "2", "a", "b", "Ġ", "ab", "12", "<extra>"]
TYPES = [3, 3, 1, 1, 1, 1, 1, 1, 1, 4]
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
ROWS = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (WIDTH, HIDDEN),
    "ffn_up": (WIDTH, HIDDEN),
    "ffn_down": (HIDDEN, WIDTH),
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's reordering of Hugging Face's q and k, one row at a time."""
    size = weight.shape[0] // heads
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return out


def hugging_face_weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": HIDDEN}
    shapes |= {f"blk.0.{name}.weight": shape for name, shape in ROWS.items()}
    return {
        name: random.normal(0, 1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(path, *, quantised=None, architecture="llama", pre="smollm", **extra):
    """Writes the weights as GGUF does; returns what its tensors hold, by GGUF name."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {
        "block_count": 1, "context_length": 64, "embedding_length": HIDDEN,
        "feed_forward_length": WIDTH, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "rope.dimension_count": HEAD_DIM,
        "vocab_size": len(TOKENS),
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(["a b", "1 2"])
    for name, token in (("bos", 1), ("eos", 0), ("unknown", 0), ("padding", 0)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_chat_template(TEMPLATE)
    held = {}
    for name, weight in {**hugging_face_weights(), **extra}.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        stored = permute(weight, heads) if heads else weight
        if quantised is None or weight.ndim == 1:
            writer.add_tensor(name, stored)
            held[name] = weight
        else:
            packed = gguf.quantize(stored, quantised)
            writer.add_tensor(name, packed, raw_dtype=quantised)
            plain = gguf.dequantize(packed, quantised)
            held[name] = unpermute(plain, heads) if heads else plain
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.mark.parametrize(
    "quantised",
    [None, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0],
    ids=str,
)
def test_the_folder_holds_the_files_weights(tmp_path, quantised):
    held = write_gguf(tmp_path / "model.gguf", quantised=quantised)
    convert_gguf(tmp_path / "model.gguf", tmp_path)
    model = load_model(tmp_path)
    np.testing.assert_array_equal(
        model.model.embed_tokens.embedding[...], held["token_embd.weight"]
    )
    attention = model.model.layers[0].self_attn
    qkv = [held[f"blk.0.attn_{part}.weight"].T for part in "qkv"]
    np.testing.assert_array_equal(
        attention.qkv_proj.kernel[...], np.concatenate(qkv, axis=1)
    )


def test_the_config_says_what_the_metadata_says(tmp_path):
    write_gguf(tmp_path / "model.gguf")
    convert_gguf(tmp_path / "model.gguf", tmp_path)
    config = load_model(tmp_path).config
    assert (config.num_key_value_heads, config.head_dim) == (KV_HEADS, HEAD_DIM)
    assert config.norm_eps == 1e-5
    assert config.tie_word_embeddings
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}


def test_an_output_tensor_makes_an_untied_model(tmp_path):
    head = np.ones((len(TOKENS), HIDDEN), np.float32)
    write_gguf(tmp_path / "model.gguf", **{"output.weight": head})
    convert_gguf(tmp_path / "model.gguf", tmp_path)
    model = load_model(tmp_path)
    np.testing.assert_array_equal(model.lm_head.kernel[...], head.T)


def test_the_tokenizer_splits_digits_and_matches_special_tokens(tmp_path):
    write_gguf(tmp_path / "model.gguf")
    convert_gguf(tmp_path / "model.gguf", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab 12<|user|><extra>") == [7, 6, 2, 3, 1, 9]
    assert tokenizer.decode([7, 6, 2, 3, 1, 9]) == "ab 12<extra>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]) == [1, 7]
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == (frozenset({0}), len(TOKENS))


def test_unpermuting_undoes_the_permutation():
    weight = np.arange(64.0).reshape(16, 4)
    np.testing.assert_array_equal(unpermute(permute(weight, 2), 2), weight)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architecture": "gemma2"}, "architecture 'gemma2', only 'llama' can be"),
        ({"pre": "llama-bpe"}, "split rule 'llama-bpe', supported: smollm"),
        ({"rope_freqs.weight": np.ones(4, np.float32)}, "rope_freqs.weight: no such"),
        ({"blk.0.attn_q.bias": np.ones(4, np.float32)}, "blk.0.attn_q.bias: no such t"),
    ],
)
def test_what_cannot_be_converted_exactly_is_refused(tmp_path, changes, match):
    write_gguf(tmp_path / "model.gguf", **changes)
    with pytest.raises(ModelError, match=match):
        convert_gguf(tmp_path / "model.gguf", tmp_path)


def test_missing_metadata_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"lacks metadata: llama\.embedding_length, "):
        convert_gguf(tmp_path / "model.gguf", tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGML" * 20)
    with pytest.raises(ModelError, match="is not a readable GGUF file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path)


def test_every_layer_name_has_a_shape_here():
    assert {name.removesuffix(".weight") for name in LAYER_NAMES} == set(ROWS)
