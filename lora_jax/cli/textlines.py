"""What `embed` and `classify` share: their input lines and their engine."""

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path

from lora_jax.adapters import FullModule, load_adapter
from lora_jax.cli.jsonl import (
    field_faults,
    kind_of,
    lora_faults,
    raise_line_faults,
    read_objects,
    token_faults,
)
from lora_jax.cli.options import DEFAULT_MAX_LORAS
from lora_jax.config import LoRAConfig
from lora_jax.errors import AdapterError, RequestError
from lora_jax.manager import LRUCacheLoRAModelManager
from lora_jax.models import Model, Tokenizer
from lora_jax.serving.texts import Score, Text, TextEngine

FIELDS = ("id", "text", "token_ids", "lora")
HEADS = ("score", "classifier", "classifier.out_proj")
"""Modules whose outputs are labels."""

LONGEST = 512
"""Tokens of a text, where the model takes more."""

INPUT = """\
An input line is
  {"id": ..., "text": "..." | ["...", "..."] | "token_ids": [...], "lora": NAME or null}
where two texts are a pair."""


def read_texts(
    path: Path, names: Collection[str], tokenizer: Tokenizer | None, model: Model
) -> list[tuple[object, Text]]:
    """Returns each line's id and its text as token ids, all lines checked.

    Args:
      path: the input file.
      names: adapters that lines may name.
      tokenizer: None if the model's folder has none; then lines hold token ids.
      model: says how long a text may be.
    Raises:
      RequestError: naming file and line of every bad line.
    """

    def check(value: Mapping) -> list[str]:
        faults = [*field_faults(value, FIELDS), *lora_faults(value, names)]
        return [*faults, *_text_faults(value)]

    objects = read_objects(path, check)
    texts, found = [], []
    for number, value in objects:
        text = _text(value, tokenizer)
        found += [f"{path}:{number}: {fault}" for fault in _length_faults(text, model)]
        texts.append((value["id"], text))
    raise_line_faults(path, found)
    return texts


def own_labels(folders: Mapping[str, Path]) -> dict[str, int | None]:
    """Returns how many labels each adapter's own head has, None without one."""
    found: dict[str, int | None] = {}
    for name, folder in folders.items():
        parts = load_adapter(folder, name=name).parts.items()
        heads = [
            part.weight.shape[0]
            for module, part in parts
            if isinstance(part, FullModule) and module.endswith(HEADS)
        ]
        found[name] = heads[-1] if heads else None
    return found


def longest_text(model: Model) -> int:
    """Returns the most tokens that a text may have."""
    config = model.config
    limit = getattr(config, "max_tokens", None) or config.max_position_embeddings
    return min(limit, LONGEST)


def text_engine(
    args: argparse.Namespace,
    model: Model,
    score: Score,
    folders: Mapping[str, Path],
    *,
    rank: int,
    labels: int | None,
) -> TextEngine:
    """Returns an engine that knows all adapters.

    Args:
      args: the options of `add_shared_options`.
      model: what to run.
      score: what to compute.
      folders: adapters by name.
      rank: largest rank among them.
      labels: most labels of a head among them; None: the base's.
    Raises:
      AdapterError: one text for all adapters that the model cannot serve.
    """
    manager = None
    if folders:
        slots = args.max_loras or min(len(folders), DEFAULT_MAX_LORAS)
        config = LoRAConfig(
            max_loras=slots,
            max_lora_rank=args.max_lora_rank or rank,
            max_cpu_loras=args.max_cpu_loras or max(slots, len(folders)),
            max_lora_cls_labels=labels,
        )
        manager = LRUCacheLoRAModelManager(model, config)
    engine = TextEngine(
        model,
        score,
        manager,
        max_num_seqs=args.max_num_seqs,
        max_len=longest_text(model),
    )
    found = []
    for name, folder in folders.items():
        try:
            engine.adapters.add(name, folder)
        except AdapterError as error:
            found.append(str(error))
    if found:
        raise AdapterError("\n".join(found))
    return engine


def check_output(output: Path, source: Path) -> None:
    """Finds out before the long work whether the answers can be written."""
    if output.exists() and output.samefile(source):
        raise RequestError(f"--output {output} is the input file; name another.")
    if output.is_dir():
        raise RequestError(f"--output {output} is a folder; name a file.")
    if not output.absolute().parent.is_dir():
        raise RequestError(f"--output {output}: its folder does not exist; make it.")


def _text_faults(value: Mapping) -> list[str]:
    given = [name for name in ("text", "token_ids") if value.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(map(repr, given)) or "none"
        return [f"expected exactly one of text, token_ids, found {found}."]
    if given == ["token_ids"]:
        return token_faults("token_ids", value["token_ids"])
    text = value["text"]
    if isinstance(text, str):
        return [] if text else ["'text' is empty."]
    if not isinstance(text, list) or [type(part) for part in text] != [str, str]:
        return [f"'text': expected text or a pair of texts, found {kind_of(text)}."]
    return []


def _text(value: Mapping, tokenizer: Tokenizer | None) -> Text:
    if value.get("token_ids") is not None:
        return Text(tuple(value["token_ids"]), lora=value.get("lora"))
    if tokenizer is None:
        raise RequestError("the model's folder has no tokenizer; give token_ids.")
    text = value["text"]
    if isinstance(text, str):
        return Text(tuple(tokenizer.encode(text)), lora=value.get("lora"))
    ids, types = tokenizer.encode_pair(*text)
    return Text(tuple(ids), tuple(types), value.get("lora"))


def _length_faults(text: Text, model: Model) -> list[str]:
    found, most = [], longest_text(model)
    vocab = model.config.vocab_size
    outside = sorted({t for t in text.token_ids if not 0 <= t < vocab})
    if outside:
        found.append(f"token ids {outside[:5]} are outside the vocabulary of {vocab}.")
    if not 0 < len(text.token_ids) <= most:
        found.append(
            f"the text has {len(text.token_ids)} tokens, the model takes 1 to {most}."
        )
    return found
