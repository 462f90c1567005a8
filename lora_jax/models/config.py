"""A Hugging Face config.json turned into the facts that the decoder is built from.

Reads the spellings of transformers 4 and 5. What cannot be computed is refused by name,
all of it in one `ModelError`. Knows no tensor names and makes no arrays.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from lora_jax.errors import ModelError, faults
from lora_jax.models.families import FAMILIES, FULL, SLIDING, Family, Windows
from lora_jax.models.reader import Reader
from lora_jax.models.rotary import Rotary
from lora_jax.models.rotary_config import read_rotary

HIDDEN_ACTS = ("silu", "swish", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")
"""Hugging Face's names of the activations that `lora_jax.models.mlp` computes."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The facts of one decoder; names and meanings are Hugging Face's.

    Attributes:
      model_type: a key of `FAMILIES`.
      num_key_value_heads: heads of keys and values, divides `num_attention_heads`.
      head_dim: width of one head; need not be `hidden_size / num_attention_heads`.
      rms_norm_eps: added to the mean square.
      max_position_embeddings: context length the model was made for, in tokens.
      tie_word_embeddings: whether the head is the embedding table.
      qkv_bias, o_bias, mlp_bias: which products add a bias.
      qk_norm: whether queries and keys are normed per head.
      rotary: angles of the position embedding.
      windows: for each layer how many positions a token sees, `None` for all.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rotary: Rotary
    windows: Windows


def read_config(folder: Path) -> ModelConfig:
    """Returns the config of a Hugging Face folder.

    Raises:
      ModelError: if config.json is missing or malformed, or asks for what cannot be
        computed; the text names every fault.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no config.json; a model is a Hugging Face folder with "
            "config.json and model.safetensors"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds {type(values).__name__}, expected an object")
    return config_from_dict(values, origin=str(path))


def config_from_dict(values: Mapping[str, object], *, origin: str) -> ModelConfig:
    """Returns the config that the content of a config.json describes.

    Args:
      values: the JSON object.
      origin: where it came from, for the error text.

    Raises:
      ModelError: naming every value that is missing, malformed or not supported.
    """
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        raise ModelError(
            f"{origin}: model_type {values.get('model_type')!r} is not supported; "
            f"known: {', '.join(sorted(FAMILIES))}"
        )
    reader = Reader({**family.defaults, **values})
    config = _build(reader, family)
    _refuse_unsupported(reader, family)
    if reader.faults:
        raise ModelError(faults(f"{origin} cannot be loaded:", reader.faults))
    return config


def _build(reader: Reader, family: Family) -> ModelConfig:
    hidden_size = reader.positive("hidden_size")
    heads = reader.positive("num_attention_heads")
    kv_heads = reader.positive_or("num_key_value_heads", heads)
    head_dim = reader.positive_or("head_dim", hidden_size // heads)
    if heads % kv_heads:
        reader.fault(
            f"num_key_value_heads {kv_heads} does not divide num_attention_heads "
            f"{heads}; every key head must serve equally many query heads"
        )
    layers = reader.positive("num_hidden_layers")
    _check_layer_types(reader, layers)
    return ModelConfig(
        model_type=reader.text("model_type"),
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.positive("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=reader.one_of("hidden_act", HIDDEN_ACTS),
        rms_norm_eps=reader.number("rms_norm_eps"),
        max_position_embeddings=reader.positive("max_position_embeddings"),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        qkv_bias=_fact(reader, family.qkv_bias),
        o_bias=_fact(reader, family.o_bias),
        mlp_bias=_fact(reader, family.mlp_bias),
        qk_norm=family.qk_norm,
        rotary=read_rotary(reader, head_dim),
        windows=() if reader.faults else family.windows(reader.values),
    )


def _fact(reader: Reader, fact: bool | str) -> bool:
    return reader.flag(fact) if isinstance(fact, str) else fact


def _check_layer_types(reader: Reader, layers: int) -> None:
    kinds = reader.values.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != layers:
        reader.fault(f"layer_types must list num_hidden_layers = {layers} kinds")
        return
    for kind in sorted({str(kind) for kind in kinds} - {FULL, SLIDING}):
        reader.fault(f"layer_types has {kind!r}; supported: {FULL}, {SLIDING}")


def _refuse_unsupported(reader: Reader, family: Family) -> None:
    if reader.values.get("quantization_config") is not None:
        reader.fault(
            "quantization_config: quantised weights are not supported; use the "
            "float16, bfloat16 or float32 checkpoint"
        )
    architectures = reader.values.get("architectures") or []
    if not isinstance(architectures, list):
        reader.fault("architectures must be a list of class names")
        return
    for name in architectures:
        if name not in family.architectures:
            reader.fault(
                f"architectures has {name!r}; supported for this model_type: "
                f"{', '.join(family.architectures)}"
            )
