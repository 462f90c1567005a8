"""Lines of the input file -> checked lines. Knows JSON, not models.

Every bad line of a file is found before anything runs; the error names each with its
file and line number.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from lora_jax.errors import RequestError, faults

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
FIELDS = ("id", *PROMPT_FIELDS, "lora", "max_tokens")

SHOWN_FAULTS = 50
"""Faults of one file in one message, at most."""


@dataclasses.dataclass(frozen=True)
class InputLine:
    """One request as written in the file; exactly one kind of prompt is not None.

    Attributes:
      number: line number, from 1.
      id: any JSON value; given back as it is.
    """

    number: int
    id: object
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, object], ...] | None = None
    lora: str | None = None
    max_tokens: int | None = None


def read_input(path: Path, lora_names: Collection[str]) -> list[InputLine]:
    """Returns the lines of a JSONL file of requests; blank lines are left out.

    Args:
      path: the file, UTF-8.
      lora_names: the adapters that a line may name.
    Raises:
      RequestError: naming file and line of every bad line, or that there is no file.
    """

    def check(value: Mapping) -> list[str]:
        return [
            *field_faults(value, FIELDS),
            *_prompt_faults(value),
            *lora_faults(value, lora_names),
            *_max_tokens_faults(value),
        ]

    return [_line(number, value) for number, value in read_objects(path, check)]


def read_objects(
    path: Path, check: Callable[[Mapping], list[str]]
) -> list[tuple[int, Mapping]]:
    """Returns the objects of a JSONL file with their line numbers, all of them checked.

    Args:
      path: the file, UTF-8; blank lines are left out.
      check: gives what is wrong with an object.
    Raises:
      RequestError: naming file and line of every bad line, or that there is no file.
    """
    if not path.exists() or path.is_dir():
        raise RequestError(f"input {path}: there is no such file.")
    objects: list[tuple[int, Mapping]] = []
    found: list[str] = []
    for number, text in enumerate(_split_lines(path), start=1):
        if not text.strip():
            continue
        problems, value = _parse(number, text)
        problems += [] if value is None else check(value)
        found += [f"{path}:{number}: {problem}" for problem in problems]
        if value is not None:
            objects.append((number, value))
    raise_line_faults(path, found)
    return objects


def raise_line_faults(path: Path, found: list[str]) -> None:
    """Raises one RequestError for all bad lines of `path`, if there are any."""
    if not found:
        return
    shown = found[:SHOWN_FAULTS]
    if len(found) > len(shown):
        shown.append(f"and {len(found) - len(shown)} more.")
    raise RequestError(faults(f"input {path} cannot be used:", shown))


def _split_lines(path: Path) -> list[bytes]:
    # Split before decoding: a bad byte then belongs to one line, and only "\n" ends a
    # line (str.splitlines would also split at U+2028 inside a prompt).
    return path.read_bytes().split(b"\n")


def _parse(number: int, text: bytes) -> tuple[list[str], Mapping | None]:
    try:
        value = _strict_json(text.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        return [f"not UTF-8: {error.reason} at byte {error.start}."], None
    except UnicodeEncodeError:
        return ["not text: an escape gives half of a surrogate pair."], None
    except (ValueError, RecursionError) as error:
        return [f"not JSON: {error}."], None
    if not isinstance(value, dict):
        return [f"expected an object, found {kind_of(value)}."], None
    return [], value


def _strict_json(text: str) -> object:
    """Parses JSON; raises ValueError for what JSON leaves open or cannot be written.

    A field that comes twice ("lora" once with a name, once null) has no one meaning;
    NaN and lone surrogates, which Python lets in, cannot be written back.
    """
    value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice!r} comes twice")
    return fields


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _line(number: int, value: Mapping) -> InputLine:
    tokens, messages = value.get("prompt_token_ids"), value.get("messages")
    return InputLine(
        number=number,
        id=value["id"],
        prompt=value.get("prompt"),
        prompt_token_ids=None if tokens is None else tuple(tokens),
        messages=None if messages is None else tuple(messages),
        lora=value.get("lora"),
        max_tokens=value.get("max_tokens"),
    )


def field_faults(value: Mapping, known: Sequence[str]) -> list[str]:
    """Returns what is wrong with an object's fields as such: unknown ones, no id."""
    # An unknown field may be a misspelt one ("laro"): ignoring it could answer with
    # the base model.
    unknown = sorted(str(field) for field in value.keys() - set(known))
    problems = [
        f"unknown field {field!r}; known: {', '.join(known)}." for field in unknown
    ]
    if "id" not in value:
        problems.append("there is no 'id'.")
    return problems


def _prompt_faults(value: Mapping) -> list[str]:
    given = [field for field in PROMPT_FIELDS if value.get(field) is not None]
    if len(given) != 1:
        found = " and ".join(repr(field) for field in given) or "none"
        return [f"expected exactly one of {', '.join(PROMPT_FIELDS)}, found {found}."]
    checks = {
        "prompt": _text_faults,
        "prompt_token_ids": _token_faults,
        "messages": _message_faults,
    }
    return checks[given[0]](value[given[0]])


def _text_faults(prompt: object) -> list[str]:
    if not isinstance(prompt, str):
        return [f"'prompt': expected text, found {kind_of(prompt)}."]
    return [] if prompt else ["'prompt' is empty."]


def _token_faults(tokens: object) -> list[str]:
    return token_faults("prompt_token_ids", tokens)


def token_faults(field: str, tokens: object) -> list[str]:
    """Returns what is wrong with a field that should hold token ids."""
    if not isinstance(tokens, list):
        return [f"{field!r}: expected a list, found {kind_of(tokens)}."]
    if not tokens:
        return [f"{field!r} is empty."]
    strangers = [token for token in tokens if type(token) is not int]
    if strangers:
        return [f"{field!r}: expected integers, found {strangers[0]!r}."]
    return []


def _message_faults(messages: object) -> list[str]:
    if not isinstance(messages, list) or not messages:
        return ["'messages': expected a list of at least one message."]
    for index, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            return [
                f"'messages'[{index}]: expected an object with role and content, both"
                " text."
            ]
    return []


def lora_faults(value: Mapping, lora_names: Collection[str]) -> list[str]:
    """Returns what is wrong with an object's "lora": no name, or one nobody has."""
    name = value.get("lora")
    if name is None:
        return []
    if not isinstance(name, str):
        return [f"'lora': expected a name or null, found {kind_of(name)}."]
    if name not in lora_names:
        known = ", ".join(sorted(lora_names)) or "none; give --lora NAME=DIR"
        return [f"unknown LoRA {name!r}; known: {known}."]
    return []


def _max_tokens_faults(value: Mapping) -> list[str]:
    count = value.get("max_tokens")
    if count is None or (type(count) is int and count >= 0):
        return []
    return [f"'max_tokens': expected an integer >= 0, found {count!r}."]


def kind_of(value: object) -> str:
    """Returns what JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
