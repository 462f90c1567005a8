"""A GGUF file's tokenizer metadata written as tokenizer.json and tokenizer_config.json.

Only byte-level BPE with a named split rule can be rebuilt; another rule would give
other token ids without any error, so it is refused.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lora_jax.errors import ModelError, faults

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

CONTROL, USER_DEFINED = 3, 4
"""GGUF token types that are matched whole: special ones, and words added later."""

SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""`<key>_token` -> the middle of `tokenizer.ggml.<value>_token_id`."""

Look = Callable[[str], object]
"""Returns one metadata value by name, `None` if there is none."""


def _smollm() -> "PreTokenizer":
    """Splits digits one by one, then words as GPT-2 does, and maps bytes to letters."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


SPLIT_RULES: dict[str, Callable[[], "PreTokenizer"]] = {"smollm": _smollm}
"""`tokenizer.ggml.pre` -> how text is split before merging."""


def write_tokenizer(look: Look, folder: Path, *, origin: str) -> None:
    """Writes tokenizer.json and tokenizer_config.json into an existing folder.

    Args:
      look: the file's metadata.
      folder: where to write.
      origin: the file's name, for the error text.

    Raises:
      ModelError: if the tokenizer is of a kind that cannot be rebuilt exactly.
    """
    wrong = []
    if look("tokenizer.ggml.model") != "gpt2":
        wrong.append(f"model {look('tokenizer.ggml.model')!r}, supported: 'gpt2' (BPE)")
    if look("tokenizer.ggml.pre") not in SPLIT_RULES:
        known = ", ".join(SPLIT_RULES)
        wrong.append(f"split rule {look('tokenizer.ggml.pre')!r}, supported: {known}")
    if wrong:
        raise ModelError(faults(f"{origin}: its tokenizer cannot be rebuilt:", wrong))
    tokens = _strings(look("tokenizer.ggml.tokens"))
    _build(look, tokens).save(str(folder / "tokenizer.json"))
    text = json.dumps(_settings(look, tokens), indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _build(look: Look, tokens: list[str]) -> "Tokenizer":
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE

    merges = [
        (left, right)
        for left, _, right in (
            merge.partition(" ") for merge in _strings(look("tokenizer.ggml.merges"))
        )
    ]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = SPLIT_RULES[str(look("tokenizer.ggml.pre"))]()
    tokenizer.decoder = ByteLevel()
    types = look("tokenizer.ggml.token_type")
    assert isinstance(types, list)
    for token, kind in zip(tokens, types, strict=True):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def _settings(look: Look, tokens: list[str]) -> dict[str, object]:
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": look("llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    for key, source in SPECIAL_KEYS.items():
        index = look(f"tokenizer.ggml.{source}_token_id")
        if isinstance(index, int):
            settings[f"{key}_token"] = tokens[index]
    if look("tokenizer.chat_template") is not None:
        settings["chat_template"] = look("tokenizer.chat_template")
    return settings


def _strings(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(item) for item in value]
