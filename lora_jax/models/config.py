"""A Hugging Face config.json turned into the facts that the decoder is built from.

Reads the spellings of transformers 4 and 5. What cannot be computed is refused by name,
all of it in one `ModelError`. Knows no tensor names and makes no arrays.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from lora_jax.errors import ModelError, faults
from lora_jax.models.activations import ACTIVATIONS
from lora_jax.models.experts_config import ExpertsConfig, read_experts
from lora_jax.models.families import FAMILIES, FULL, SLIDING, Family
from lora_jax.models.labels import read_labels
from lora_jax.models.reader import Reader
from lora_jax.models.rotary import LongRotary, Rotary
from lora_jax.models.rotary_config import read_rotary

PLAIN = "use the float16, bfloat16 or float32 checkpoint"
DEQUANTISE = (
    "load the model in transformers with "
    "quantization_config=Mxfp4Config(dequantize=True), and save it as bfloat16"
)
"""What to do about a checkpoint of quantised weights."""

Parts = tuple[tuple[str, int], ...]
"""Name and output width of each child of a fused projection, in column order."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The facts of one decoder; names and meanings are Hugging Face's.

    Attributes:
      model_type: a key of `FAMILIES`.
      num_key_value_heads: heads of keys and values, divides `num_attention_heads`.
      head_dim: width of one head; need not be `hidden_size / num_attention_heads`.
      norm, norm_eps: a key of `lora_jax.models.norm.NORMS`, and what it adds to the
        mean square.
      max_position_embeddings: longest text in tokens; of a model with longrope its
        original context, see `LongRotary`.
      tie_word_embeddings: whether the head is the embedding table.
      qkv_bias, o_bias, mlp_bias: which products add a bias.
      qk_norm: whether queries and keys are normed, each head for itself (`"head"`)
        or all heads together (`"whole"`); `None` for no norm.
      sinks: whether each head has a score of its own for attending to nothing.
      clip_qkv: bound of queries, keys and values, `None` for none.
      sandwich_norms: whether a block's output is normed as well as its input.
      fused_tensors: whether the checkpoint (and so an adapter) names qkv and gate_up
        as one projection each.
      embedding_scale: what embeddings are multiplied with.
      query_scale: what attention scores are multiplied with.
      attention_softcap, logit_softcap: bound of `cap * tanh(x / cap)`, `None` for none.
      rotaries: for each layer the angles of its position embedding; empty if positions
        have a learned one.
      windows: for each layer how many positions a token sees, `None` for all.
      head: `"causal_lm"`, `"classifier"`, or `"none"` for hidden states only.
      labels: one name for each score of a classification head.
      experts: the experts of the layers that have some; `None` if no layer has.
      renamed: what a checkpoint may write in a tensor's name -> what stands in the
        model's path.
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
    norm: str
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: str | None
    sinks: bool
    clip_qkv: float | None
    sandwich_norms: bool
    fused_tensors: bool
    embedding_scale: float
    query_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    rotaries: tuple[Rotary, ...]
    windows: tuple[int | None, ...]
    head: str
    labels: tuple[str, ...]
    experts: ExpertsConfig | None
    renamed: tuple[tuple[str, str], ...]

    @property
    def body(self) -> str:
        """Returns which body computes the model."""
        return "decoder" if self.rotaries else "gpt2"

    @property
    def qkv_parts(self) -> Parts:
        """Returns the projections that `qkv_proj` holds side by side."""
        q = self.num_attention_heads * self.head_dim
        kv = self.num_key_value_heads * self.head_dim
        if self.fused_tensors:
            return (("qkv_proj", q + 2 * kv),)
        return (("q_proj", q), ("k_proj", kv), ("v_proj", kv))

    @property
    def layers_with_experts(self) -> tuple[bool, ...]:
        """Returns for each layer whether its feed-forward block has experts."""
        if self.experts is None:
            return (False,) * self.num_hidden_layers
        return self.experts.layers

    def gate_up_parts(self, width: int) -> Parts:
        """Returns the projections that `gate_up_proj` holds side by side.

        Args:
          width: inside the feed-forward block.
        """
        if self.fused_tensors:
            return (("gate_up_proj", 2 * width),)
        return (("gate_proj", width), ("up_proj", width))


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
    reader = Reader({**family.defaults, **_common_spelling(values, family)})
    config = _build(reader, family)
    _refuse_unsupported(reader, family)
    if reader.faults:
        raise ModelError(faults(f"{origin} cannot be loaded:", reader.faults))
    return config


def _common_spelling(values: Mapping[str, object], family: Family) -> dict[str, object]:
    """Returns the values with the family's own keys under their common names too."""
    renamed = {
        common: values[own] for common, own in family.spellings.items() if own in values
    }
    return {**values, **renamed}


def _build(reader: Reader, family: Family) -> ModelConfig:
    hidden_size = reader.positive("hidden_size")
    heads = reader.positive("num_attention_heads")
    kv_heads = reader.positive_or("num_key_value_heads", heads)
    head_dim = reader.positive_or("head_dim", max(hidden_size // heads, 1))
    if heads % kv_heads:
        reader.fault(
            f"num_key_value_heads {kv_heads} does not divide num_attention_heads "
            f"{heads}; every key head must serve equally many query heads"
        )
    kinds = _layer_kinds(reader, family)
    window = reader.positive_or("sliding_window", 0) if SLIDING in kinds else 0
    rotary = {
        kind: read_rotary(reader, head_dim, kind, family.rotary_kinds)
        for kind in sorted(set(kinds) if family.rotary_kinds else ())
    }
    scale = family.scaled_embedding
    return ModelConfig(
        model_type=reader.text("model_type"),
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.positive_or("intermediate_size", 4 * hidden_size)
        if "intermediate_size" in family.defaults
        else reader.positive("intermediate_size"),
        num_hidden_layers=reader.positive("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=reader.one_of("hidden_act", tuple(ACTIVATIONS)),
        norm=family.norm,
        norm_eps=reader.number("rms_norm_eps"),
        max_position_embeddings=_longest_text(reader, rotary.values()),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        qkv_bias=_fact(reader, family.qkv_bias),
        o_bias=_fact(reader, family.o_bias),
        mlp_bias=_fact(reader, family.mlp_bias),
        qk_norm=family.qk_norm,
        sinks=family.sinks,
        clip_qkv=reader.number_or("clip_qkv", 0.0) or None,
        sandwich_norms=family.sandwich_norms,
        fused_tensors=family.fused_tensors,
        embedding_scale=hidden_size**0.5 if scale else 1.0,
        query_scale=reader.number_or("query_pre_attn_scalar", float(head_dim)) ** -0.5,
        attention_softcap=reader.number_or("attn_logit_softcapping", 0.0) or None,
        logit_softcap=reader.number_or("final_logit_softcapping", 0.0) or None,
        rotaries=tuple(rotary[kind] for kind in kinds if rotary),
        windows=tuple(window or None if kind == SLIDING else None for kind in kinds),
        head=_head(reader, family),
        labels=read_labels(reader),
        experts=read_experts(reader, family.experts) if family.experts else None,
        renamed=tuple(family.renamed.items()),
    )


def _longest_text(reader: Reader, rotaries: Iterable[Rotary]) -> int:
    """Returns the context length, shorter where only the short factors are computed."""
    limits = [r.original_positions for r in rotaries if isinstance(r, LongRotary)]
    return min([reader.positive("max_position_embeddings"), *limits])


def _fact(reader: Reader, fact: bool | str) -> bool:
    return reader.flag(fact) if isinstance(fact, str) else fact


def _layer_kinds(reader: Reader, family: Family) -> tuple[str, ...]:
    """Returns each layer's kind, all of them known ones."""
    layers = reader.positive("num_hidden_layers")
    listed = reader.values.get("layer_types")
    if listed is not None and (not isinstance(listed, list) or len(listed) != layers):
        reader.fault(f"layer_types must list num_hidden_layers = {layers} kinds")
        return (FULL,) * layers
    kinds = family.layer_kinds(reader.values)
    for kind in sorted(set(map(str, listed or kinds)) - {FULL, SLIDING}):
        reader.fault(f"layer_types has {kind!r}; supported: {FULL}, {SLIDING}")
    return tuple(kind if kind == SLIDING else FULL for kind in kinds)


def _refuse_unsupported(reader: Reader, family: Family) -> None:
    quantisation = reader.nested("quantization_config")
    if quantisation:
        method = str(quantisation.get("quant_method"))
        advice = DEQUANTISE if method == "mxfp4" else PLAIN
        name = "quantised" if method == "None" else method
        reader.fault(f"quantization_config: {name} weights are not supported; {advice}")
    for key, computed in family.fixed.items():
        if reader.values.get(key) not in computed:
            found = f"{key}: found {reader.values[key]!r}"
            reader.fault(f"{found}, supported: {', '.join(map(repr, computed))}")


def _head(reader: Reader, family: Family) -> str:
    """Returns the head that `architectures` names; a language model's if none."""
    named = reader.values.get("architectures") or []
    if not isinstance(named, list):
        reader.fault("architectures must be a list of class names")
        return "causal_lm"
    for name in named:
        if name not in family.architectures:
            reader.fault(
                f"architectures has {name!r}; supported for this model_type: "
                f"{', '.join(family.architectures)}"
            )
    heads = [family.architectures.get(str(name), "causal_lm") for name in named]
    return heads[0] if heads else "causal_lm"
