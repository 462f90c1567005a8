"""The only code that knows a checkpoint's tensor names.

Turns a config into a table: tensor name in the file -> where it goes in the model, with
which shape in the file, transposed or not, into which columns of a fused kernel.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from lora_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Target:
    """Where one tensor of a checkpoint goes.

    Attributes:
      path: names from the root module to the parameter, as in `nnx.to_flat_state`.
      shape: of the tensor in the file.
      transposed: whether the parameter is the tensor's transpose.
      start: first output column (kernel) or element (bias) of a fused parameter.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    start: int = 0


Part = tuple[str, int]
Table = dict[str, Target]

TIED_HEAD = "lm_head.weight"
"""In the file of a tied model this tensor may repeat the embedding table."""

EMBEDDING = "model.embed_tokens.weight"

COMPUTED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers of old checkpoints that the config gives as well; read and left."""


def checkpoint_table(config: ModelConfig) -> Table:
    """Returns the place of every tensor that a checkpoint of `config` must hold."""
    table = {
        EMBEDDING: Target(
            ("model", "embed_tokens", "embedding"),
            (config.vocab_size, config.hidden_size),
        ),
        "model.norm.weight": Target(("model", "norm", "scale"), (config.hidden_size,)),
    }
    for layer in range(config.num_hidden_layers):
        table.update(_layer(config, layer))
    if not config.tie_word_embeddings:
        head = (("lm_head", config.vocab_size),)
        table.update(_linear((), "lm_head", head, config.hidden_size, bias=False))
    return table


def _layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, Target]]:
    d, head = config.hidden_size, config.head_dim
    width = config.intermediate_size
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    at = ("model", "layers", layer)
    attention, mlp = (*at, "self_attn"), (*at, "mlp")
    qkv = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    gate_up = (("gate_proj", width), ("up_proj", width))
    yield from _linear(attention, "qkv_proj", qkv, d, bias=config.qkv_bias)
    yield from _linear(attention, "o_proj", (("o_proj", d),), q, bias=config.o_bias)
    yield from _linear(mlp, "gate_up_proj", gate_up, d, bias=config.mlp_bias)
    yield from _linear(
        mlp, "down_proj", (("down_proj", d),), width, bias=config.mlp_bias
    )
    yield _norm((*at, "input_layernorm"), d)
    yield _norm((*at, "post_attention_layernorm"), d)
    if config.qk_norm:
        yield _norm((*attention, "q_norm"), head)
        yield _norm((*attention, "k_norm"), head)


def _linear(
    at: tuple[str | int, ...],
    name: str,
    parts: Iterable[Part],
    d_in: int,
    *,
    bias: bool,
) -> Iterator[tuple[str, Target]]:
    """Gives each part of a (fused) layer; torch keeps the transpose of our kernels."""
    start = 0
    for part, width in parts:
        prefix = ".".join(map(str, (*at, part)))
        kernel = Target((*at, name, "kernel"), (width, d_in), True, start)
        yield f"{prefix}.weight", kernel
        if bias:
            yield f"{prefix}.bias", Target((*at, name, "bias"), (width,), False, start)
        start += width


def _norm(at: tuple[str | int, ...], features: int) -> tuple[str, Target]:
    return ".".join(map(str, at)) + ".weight", Target((*at, "scale"), (features,))
