"""Text to token ids and back, and chat messages to a prompt, as transformers does it.

Wraps the `tokenizers` library; renders chat templates with jinja2's sandbox, since a
template is a program that came with somebody's checkpoint.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lora_jax.errors import ModelError

if TYPE_CHECKING:
    import tokenizers

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
"""What a chat template may name."""

Message = Mapping[str, object]
"""One turn of a chat, `{"role": ..., "content": ...}`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """The tokenizer of one folder.

    Attributes:
      folder: where it came from.
      backend: the `tokenizers.Tokenizer`; padding and truncation are off.
      chat_template: Jinja source, or `None` if the folder has none.
      special_tokens: texts of `bos_token`, `eos_token`, ..., as far as given.
      eos_ids: ids that end an answer.
    """

    folder: Path
    backend: "tokenizers.Tokenizer"
    chat_template: str | None
    special_tokens: Mapping[str, str]
    eos_ids: frozenset[int]

    @property
    def vocab_size(self) -> int:
        """Returns the number of token ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`.

        Args:
          text: any string.
          add_special_tokens: whether to add what the model's tokenizer adds around a
            text (such as a first `<s>`); chat templates write these themselves.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_pair(self, text: str, pair: str) -> tuple[list[int], list[int]]:
        """Returns the token ids of two texts as one input, and each token's segment."""
        encoding = self.backend.encode(text, pair)
        return encoding.ids, encoding.type_ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Returns the token ids of a chat, ready for the model's answer.

        Args:
          messages: turns, oldest first.
          add_generation_prompt: whether to open the assistant's turn at the end.

        Raises:
          ModelError: if the folder has no chat template, or the template refuses the
            messages.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """Returns the text that `apply_chat_template` encodes; raises as it does."""
        import jinja2

        if self.chat_template is None:
            raise ModelError(
                f"{self.folder} has no chat template (chat_template in "
                "tokenizer_config.json, or chat_template.jinja); give plain prompts "
                "instead of messages"
            )
        try:
            return (
                _environment()
                .from_string(self.chat_template)
                .render(
                    messages=[dict(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    **self.special_tokens,
                )
            )
        except jinja2.TemplateError as error:
            raise ModelError(
                f"{self.folder}: its chat template refuses the messages: {error}"
            ) from error


def read_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face folder.

    Raises:
      ModelError: if there is no tokenizer.json, or a file of it is malformed.
    """
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json; save the tokenizer again with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{path} cannot be read: {error}") from error
    # A file may carry the settings of somebody's training run; prompts are whole here.
    backend.no_padding()
    backend.no_truncation()
    settings = _read_json(folder / "tokenizer_config.json")
    return Tokenizer(
        folder=folder,
        backend=backend,
        chat_template=_chat_template(folder, settings),
        special_tokens=_special_tokens(settings),
        eos_ids=_eos_ids(folder, settings, backend),
    )


def _environment():
    """Returns the environment that transformers renders templates in."""
    import datetime

    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(text: str) -> None:
        import jinja2

        raise jinja2.TemplateError(text)

    def to_json(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(
        form
    )
    return environment


def _read_json(path: Path) -> dict[str, object]:
    """Returns the object in a JSON file, empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds {type(values).__name__}, expected an object")
    return values


def _chat_template(folder: Path, settings: Mapping[str, object]) -> str | None:
    """Returns the default template; transformers 4.5x and later keep it in a file."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(settings: Mapping[str, object]) -> dict[str, str]:
    """Returns the special tokens' texts; a file gives a string or an AddedToken."""
    found = {}
    for name in SPECIAL_NAMES:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _eos_ids(
    folder: Path, settings: Mapping[str, object], backend: "tokenizers.Tokenizer"
) -> frozenset[int]:
    """Takes the first of generation_config, config, tokenizer that names them."""
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        if isinstance(ids, int):
            return frozenset({ids})
        if isinstance(ids, list):
            return frozenset(ids)
    text = _special_tokens(settings).get("eos_token")
    token_id = None if text is None else backend.token_to_id(text)
    return frozenset() if token_id is None else frozenset({token_id})
