"""The rotary part of a config.json, in either of its two spellings.

transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 one object
`rope_parameters`.
"""

from collections.abc import Callable

from lora_jax.models.families import SLIDING
from lora_jax.models.reader import Reader
from lora_jax.models.rotary import (
    DefaultRotary,
    LinearRotary,
    Llama3Rotary,
    LongRotary,
    Rotary,
    YarnRotary,
    long_attention_factor,
    yarn_attention_factor,
)


def read_rotary(
    reader: Reader, head_dim: int, layer_kind: str, supported: tuple[str, ...]
) -> Rotary:
    """Returns the rotary embedding that a config asks for.

    Args:
      reader: the whole config, defaults filled in; gets a fault for everything wrong.
      head_dim: width of one head.
      layer_kind: the entry of `layer_types` of the layers that it is for.
      supported: the kinds of scaling that the family may name, keys of `_KINDS`.
    """
    inner = Reader(_gathered(reader, layer_kind))
    kind = inner.one_of("rope_type", supported)
    dim = int(head_dim * inner.number("partial_rotary_factor"))
    if dim <= 0 or dim % 2:
        inner.fault(f"rotates {dim} features of a head; must be even and positive")
    rotary = _KINDS[kind](inner, inner.number("rope_theta"), dim)
    for fault in inner.faults:
        reader.fault(f"rotary position embedding: {fault}")
    return rotary


def _gathered(reader: Reader, layer_kind: str) -> dict[str, object]:
    """Returns the keys of either spelling as one object.

    A model whose sliding layers have a base of their own (Gemma 3) writes one object
    for each kind of layer in transformers 5, `rope_local_base_freq` in transformers 4.
    """
    outer = reader.values
    local = outer.get("rope_local_base_freq") if layer_kind == SLIDING else None
    values = reader.nested("rope_parameters")
    if layer_kind in values:
        values = Reader(values).nested(layer_kind)
    elif local is None:
        values = values or reader.nested("rope_scaling")
    else:
        values = {"rope_theta": local}
    original = outer.get("original_max_position_embeddings")
    values.setdefault("rope_theta", outer["rope_theta"] if local is None else local)
    values.setdefault("partial_rotary_factor", outer.get("partial_rotary_factor", 1.0))
    values.setdefault("rope_type", values.get("type", "default"))
    if values["rope_type"] == "su":  # what longrope was called at first
        values["rope_type"] = "longrope"
    values["max_position_embeddings"] = outer["max_position_embeddings"]
    if original is not None:  # goes before the nested one, as in transformers
        values["original_max_position_embeddings"] = original
    values.setdefault(
        "original_max_position_embeddings", outer["max_position_embeddings"]
    )
    return values


def _default(_: Reader, theta: float, dim: int) -> Rotary:
    return DefaultRotary(theta, dim)


def _linear(inner: Reader, theta: float, dim: int) -> Rotary:
    return LinearRotary(theta, dim, inner.number("factor"))


def _llama3(inner: Reader, theta: float, dim: int) -> Rotary:
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if low >= high and not inner.faults:
        inner.fault(f"low_freq_factor {low} must be below high_freq_factor {high}")
    return Llama3Rotary(
        theta,
        dim,
        factor=inner.number("factor"),
        original_positions=inner.positive("original_max_position_embeddings"),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(inner: Reader, theta: float, dim: int) -> Rotary:
    factor = inner.number("factor")
    given = inner.number_or("attention_factor", 0.0)
    mscales = inner.number_or("mscale", 0.0), inner.number_or("mscale_all_dim", 0.0)
    return YarnRotary(
        theta,
        dim,
        factor=factor,
        original_positions=inner.positive("original_max_position_embeddings"),
        beta_fast=inner.number_or("beta_fast", 32.0),
        beta_slow=inner.number_or("beta_slow", 1.0),
        truncate=inner.flag_or("truncate", True),
        attention_factor=given or yarn_attention_factor(factor, *mscales),
    )


def _longrope(inner: Reader, theta: float, dim: int) -> Rotary:
    original = inner.positive("original_max_position_embeddings")
    longest = inner.positive("max_position_embeddings")
    factor = inner.number_or("factor", longest / original)
    given = inner.number_or("attention_factor", 0.0)
    return LongRotary(
        theta,
        dim,
        original_positions=original,
        factors=inner.numbers("short_factor", dim // 2),
        attention_factor=given or long_attention_factor(factor, original),
    )


_KINDS: dict[str, Callable[[Reader, float, int], Rotary]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
