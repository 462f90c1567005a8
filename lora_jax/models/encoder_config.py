"""A BERT-like config.json turned into the facts that the encoder is built from."""

import dataclasses
from collections.abc import Mapping

from lora_jax.errors import ModelError, faults
from lora_jax.models.activations import ACTIVATIONS
from lora_jax.models.labels import read_labels
from lora_jax.models.reader import Reader


@dataclasses.dataclass(frozen=True)
class EncoderFamily:
    """The unsaid facts of one encoder `model_type`.

    Attributes:
      architecture: the beginning of its class names.
      body: the name that a model with a head gives its body.
      pad_token_id: what config.json may leave out.
      counts_from_padding: whether positions are numbered from `pad_token_id + 1`,
        padding left out, as fairseq does.
    """

    architecture: str
    body: str
    pad_token_id: int
    counts_from_padding: bool


ENCODER_FAMILIES: dict[str, EncoderFamily] = {
    "bert": EncoderFamily("Bert", "bert", 0, False),
    "roberta": EncoderFamily("Roberta", "roberta", 1, True),
    "xlm-roberta": EncoderFamily("XLMRoberta", "roberta", 1, True),
}
"""The `model_type`s of encoders that can be loaded."""

HEADS: Mapping[str, str] = {
    "Model": "none",
    "ForMaskedLM": "none",
    "ForPreTraining": "none",
    "ForSequenceClassification": "classifier",
}
"""The ends of class names -> `EncoderConfig.head`."""

DEFAULTS: Mapping[str, object] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
"""What config.json may leave out, the same in all three families."""


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """The facts of one encoder; names and meanings are Hugging Face's.

    Attributes:
      model_type: a key of `ENCODER_FAMILIES`.
      max_position_embeddings: rows of the position table, the padding's included.
      type_vocab_size: number of segments that a token can belong to.
      first_position: position of the first token.
      body: the name that a model with a head gives its body.
      head: `"classifier"`, or `"none"` for hidden states only.
      has_pooler: whether the body holds BERT's pooler; hidden states do not need it.
      labels: one name for each score of a classification head.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str
    norm_eps: float
    max_position_embeddings: int
    type_vocab_size: int
    first_position: int
    body: str
    head: str
    has_pooler: bool
    labels: tuple[str, ...]

    @property
    def head_dim(self) -> int:
        """Returns the width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def max_tokens(self) -> int:
        """Returns the longest text that has positions, in tokens."""
        return self.max_position_embeddings - self.first_position


def encoder_config(values: Mapping[str, object], *, origin: str) -> EncoderConfig:
    """Returns the config that the content of a config.json describes.

    Args:
      values: the JSON object; its `model_type` is a key of `ENCODER_FAMILIES`.
      origin: where it came from, for the error text.

    Raises:
      ModelError: naming every value that is missing, malformed or not supported.
    """
    family = ENCODER_FAMILIES[str(values["model_type"])]
    reader = Reader({**DEFAULTS, "pad_token_id": family.pad_token_id, **values})
    heads = reader.positive("num_attention_heads")
    hidden_size = reader.positive("hidden_size")
    if hidden_size % heads:
        reader.fault(
            f"num_attention_heads {heads} does not divide hidden_size {hidden_size}"
        )
    _refuse_unsupported(reader)
    head = _head(reader, family)
    config = EncoderConfig(
        model_type=reader.text("model_type"),
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.positive("intermediate_size"),
        num_hidden_layers=reader.positive("num_hidden_layers"),
        num_attention_heads=heads,
        hidden_act=reader.one_of("hidden_act", tuple(ACTIVATIONS)),
        norm_eps=reader.number("layer_norm_eps"),
        max_position_embeddings=reader.positive("max_position_embeddings"),
        type_vocab_size=reader.positive("type_vocab_size"),
        first_position=_first_position(reader, family),
        body=family.body,
        head=head,
        has_pooler=head == "none" or family.body == "bert",
        labels=read_labels(reader),
    )
    if reader.faults:
        raise ModelError(faults(f"{origin} cannot be loaded:", reader.faults))
    return config


def _head(reader: Reader, family: EncoderFamily) -> str:
    """Returns the head that `architectures` names; a masked-token head is left."""
    found = reader.values.get("architectures")
    for name in found if isinstance(found, list) else []:
        kind = str(name).removeprefix(family.architecture)
        if not str(name).startswith(family.architecture) or kind not in HEADS:
            known = ", ".join(family.architecture + kind for kind in HEADS)
            reader.fault(f"architectures has {name!r}; supported: {known}")
        else:
            return HEADS[kind]
    return "none"


def _first_position(reader: Reader, family: EncoderFamily) -> int:
    return reader.index("pad_token_id") + 1 if family.counts_from_padding else 0


def _refuse_unsupported(reader: Reader) -> None:
    if reader.values.get("position_embedding_type", "absolute") != "absolute":
        found = reader.values["position_embedding_type"]
        reader.fault(f"position_embedding_type: found {found!r}, supported: 'absolute'")
    for key in ("is_decoder", "add_cross_attention"):
        if reader.values.get(key):
            reader.fault(f"{key}: found {reader.values[key]!r}, supported: False")
    if reader.values.get("quantization_config") is not None:
        reader.fault("quantization_config: quantised weights are not supported")
