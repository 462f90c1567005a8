"""A request in a row of the batch: what it has produced, and when it is done."""

import dataclasses

import numpy as np

from lora_jax.adapters import Adapter
from lora_jax.routing import activation_start
from lora_jax.serving.batch import Prompt
from lora_jax.serving.requests import FinishReason, GenerationRequest, GenerationResult
from lora_jax.serving.rows import RowFacts
from lora_jax.shapes import BASE_SLOT


@dataclasses.dataclass(eq=False)
class Running:
    """A request that has a row.

    Attributes:
      request: what was asked.
      row, slot: where it runs, and where its adapter is; both stay until it ends.
      adapter_hash: content hash of that adapter; None for the base.
      start: first position on which the adapter acts.
      tokens: generated so far.
      prompt_logprobs: as in `GenerationResult`.
    """

    request: GenerationRequest
    row: int
    slot: int
    adapter_hash: str | None
    start: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[float | None, ...] | None = None

    def prompt(self) -> Prompt:
        """What the prefill needs: the prompt up to its last token, and draw 0."""
        tokens = self.request.prompt_token_ids
        facts = self._facts(position=len(tokens) - 1, step=0)
        return Prompt(tokens, facts, scored=self.request.prompt_logprobs)

    def next_facts(self) -> RowFacts:
        """Facts of the decode step that feeds the newest token."""
        drawn = len(self.tokens)
        fed = len(self.request.prompt_token_ids) + drawn - 1
        return self._facts(position=fed, step=drawn)

    def _facts(self, *, position: int, step: int) -> RowFacts:
        return RowFacts(
            self.row, position, self.slot, self.start, step, self.request.sampling
        )

    def take_scores(self, scores: np.ndarray) -> None:
        """Keeps the log-probabilities of prompt tokens 1, 2, ..."""
        self.prompt_logprobs = (None, *(float(score) for score in scores))

    def take_token(self, token: int) -> tuple[int, ...]:
        """Keeps the newest token, unless none was asked for; returns what is new."""
        if self.request.max_tokens == 0:
            return ()
        self.tokens.append(token)
        return (token,)

    def finish_reason(
        self, eos_ids: frozenset[int], max_model_len: int
    ) -> FinishReason | None:
        """Returns why the request is done now; None if it is not."""
        stop = self.request.stop_token_ids
        if self.tokens and self.tokens[-1] in (eos_ids if stop is None else stop):
            return FinishReason.STOP
        length = len(self.request.prompt_token_ids) + len(self.tokens)
        if len(self.tokens) >= self.request.max_tokens or length >= max_model_len:
            return FinishReason.LENGTH
        return None

    def result(self, reason: FinishReason) -> GenerationResult:
        """Returns the answer as it stands."""
        return dataclasses.replace(
            empty_result(self.request, reason),
            token_ids=tuple(self.tokens),
            prompt_logprobs=self.prompt_logprobs,
            adapter_hash=self.adapter_hash,
        )


def seat(
    request: GenerationRequest, row: int, adapter: Adapter | None, slot: int | None
) -> Running:
    """Returns a request in a row, with its adapter held in `slot`; None for the base.

    An activated LoRA whose invocation the prompt lacks acts on no token: its row is a
    base row.
    """
    if adapter is None:
        return Running(request, row, BASE_SLOT, None)
    assert slot is not None
    start = activation_start(request.prompt_token_ids, adapter.invocation_tokens)
    if start is None:
        return Running(request, row, BASE_SLOT, adapter.content_hash)
    return Running(request, row, slot, adapter.content_hash, start)


def empty_result(
    request: GenerationRequest, reason: FinishReason, error: str | None = None
) -> GenerationResult:
    """Returns the answer to a request that never got a row."""
    return GenerationResult(
        request.request_id,
        request.lora,
        request.prompt_token_ids,
        token_ids=(),
        finish_reason=reason,
        error=error,
    )
