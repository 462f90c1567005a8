"""What is asked of the engine and what it answers. Plain values: no jax, no model.

A `GenerationRequest` goes in; `TokenEvent`s come out, one for each token; the last
one carries the `GenerationResult`.
"""

import dataclasses
import enum
import math

from lora_jax.errors import RequestError, faults

SEED_RANGE = 2**32
"""Seeds are taken from `[0, SEED_RANGE)`: one 32-bit word travels with each row."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens.

    Args:
      temperature: 0 chooses the most likely token; above 0 draws from the softmax of
        `logits / temperature`.
      top_k: draws among the `top_k` most likely tokens only; 0 means among all.
      top_p: draws among the fewest most likely tokens whose probabilities sum to at
        least `top_p`, in (0, 1]; applied after `temperature` and `top_k`.
      seed: in [0, 2**32). The n-th token of a request depends on its prompt, its
        seed and n alone: never on the other rows of the batch.
    Raises:
      RequestError: naming every value that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        found = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            found.append(f"temperature {self.temperature}: expected a number >= 0.")
        if self.top_k < 0:
            found.append(f"top_k {self.top_k}: expected 0 (all tokens) or more.")
        if not 0 < self.top_p <= 1:
            found.append(f"top_p {self.top_p}: expected a number in (0, 1].")
        if not 0 <= self.seed < SEED_RANGE:
            found.append(f"seed {self.seed}: expected an integer in [0, 2**32).")
        if found:
            raise RequestError(faults("sampling options cannot be used:", found))


GREEDY = SamplingParams()


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """One prompt, the adapter that answers it, and when to stop.

    Args:
      request_id: the caller's name for it, unique among the requests in flight.
      prompt_token_ids: at least one token id of the model's vocabulary.
      lora: name of an adapter, or None for the base model.
      max_tokens: tokens to generate at most; 0 only scores the prompt.
      sampling: greedy by default.
      stop_token_ids: generation ends after one of these; None means the engine's
        `eos_ids`, an empty tuple never stops early.
      prompt_logprobs: whether to return the log-probability of each prompt token.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    lora: str | None = None
    max_tokens: int = 16
    sampling: SamplingParams = GREEDY
    stop_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: bool = False


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """The answer to one request.

    Attributes:
      request_id, lora, prompt_token_ids: as asked.
      token_ids: the generated tokens; a stop token, if one came, is the last.
      finish_reason: "stop" after a stop token, "length" at `max_tokens` or the
        engine's `max_model_len`, "cancelled", or "error".
      prompt_logprobs: one entry for each prompt token: None for the first, then the
        natural logarithm of its probability given the tokens before; None if not
        asked for.
      adapter_hash: content hash of the adapter that answered; None for the base.
      error: what went wrong when `finish_reason` is "error".
    """

    request_id: str
    lora: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_logprobs: tuple[float | None, ...] | None = None
    adapter_hash: str | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """One step's news of one request.

    Attributes:
      request_id: whose.
      token_ids: the new tokens; empty when the request ended without one.
      result: the whole answer once the request has ended, else None.
    """

    request_id: str
    token_ids: tuple[int, ...]
    result: GenerationResult | None = None
