"""Input lines -> requests for the engine: text becomes token ids."""

import dataclasses
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

from lora_jax.cli.jsonl import InputLine, raise_line_faults
from lora_jax.errors import LoRAError
from lora_jax.models import Tokenizer
from lora_jax.serving import GenerationRequest, SamplingParams


@dataclasses.dataclass(frozen=True)
class Options:
    """What holds for all lines of a file.

    Attributes:
      max_tokens: for lines that do not say.
      sampling: its seed is mixed with each line's id, so that lines differ and a line
        gets the same answer wherever it stands in the file.
      prompt_logprobs: whether to score prompts.
      max_prompt_len: longest prompt that the model takes, in tokens.
      vocab_size: token ids are below it.
    """

    max_tokens: int
    sampling: SamplingParams
    prompt_logprobs: bool
    max_prompt_len: int
    vocab_size: int


def to_requests(
    path: Path, lines: Sequence[InputLine], tokenizer: Tokenizer, options: Options
) -> list[GenerationRequest]:
    """Returns one request for each line, its id being the line number.

    Raises:
      RequestError: naming file and line of every prompt that the model cannot take.
    """
    requests, found = [], []
    for line in lines:
        try:
            tokens = _tokens(line, tokenizer)
        except LoRAError as error:
            found.append(f"{path}:{line.number}: {error}")
            continue
        found += [f"{path}:{line.number}: {p}" for p in _faults(tokens, line, options)]
        requests.append(_request(line, tokens, options))
    raise_line_faults(path, found)
    return requests


def _tokens(line: InputLine, tokenizer: Tokenizer) -> tuple[int, ...]:
    if line.prompt_token_ids is not None:
        return line.prompt_token_ids
    if line.messages is not None:
        return tuple(tokenizer.apply_chat_template(line.messages))
    assert line.prompt is not None
    return tuple(tokenizer.encode(line.prompt))


def _faults(tokens: tuple[int, ...], line: InputLine, options: Options) -> list[str]:
    if not tokens:
        return ["the prompt has no tokens."]
    problems = []
    outside = sorted({t for t in tokens if not 0 <= t < options.vocab_size})
    # An adapter may have a larger vocabulary of its own; then the engine decides.
    if outside and line.lora is None:
        problems.append(
            f"token ids {outside[:5]} are outside the vocabulary of"
            f" {options.vocab_size}."
        )
    if len(tokens) > options.max_prompt_len:
        problems.append(
            f"the prompt has {len(tokens)} tokens, the model takes at most"
            f" {options.max_prompt_len}; shorten it."
        )
    return problems


def _request(
    line: InputLine, tokens: tuple[int, ...], options: Options
) -> GenerationRequest:
    sampling = options.sampling
    if sampling.temperature > 0:
        own = zlib.crc32(json.dumps(line.id, sort_keys=True).encode())
        sampling = dataclasses.replace(sampling, seed=sampling.seed ^ own)
    return GenerationRequest(
        request_id=str(line.number),
        prompt_token_ids=tokens,
        lora=line.lora,
        max_tokens=options.max_tokens if line.max_tokens is None else line.max_tokens,
        sampling=sampling,
        prompt_logprobs=options.prompt_logprobs,
    )
