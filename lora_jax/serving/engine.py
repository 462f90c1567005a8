"""The serving engine: a queue of requests in, tokens out, one jitted step at a time.

    requests -> Scheduler (rows, slots) -> Batch: prefill of new rows | decode of all
             -> one read of the newest tokens -> TokenEvents, GenerationResults

The batch owns the device state, the manager owns adapters and bank; the engine joins
them. It works on token ids: no text, no files. Use it from one thread.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from lora_jax.manager import LoRAModelManager
from lora_jax.models import CausalLM
from lora_jax.serving.adapters import ServedAdapters
from lora_jax.serving.batch import Batch, StepOutput
from lora_jax.serving.buckets import smallest_that_holds
from lora_jax.serving.intake import Intake
from lora_jax.serving.limits import engine_limits
from lora_jax.serving.requests import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    TokenEvent,
)
from lora_jax.serving.running import Running, empty_result, seat
from lora_jax.serving.scheduler import Admission, Scheduler
from lora_jax.slots import Hold

PATIENCE = 4
"""Passings-over per row of the batch before a request makes an adapter close."""


class Engine:
    """Continuous batching over one model and the adapters of its manager.

    Args:
      model: the decoder; if there is a manager, the model that it wraps.
      manager: keeps the adapters; None serves the base model alone.
      max_num_seqs: rows of the batch, i.e. requests that run at the same time.
      max_model_len: prompt plus generated tokens of one request, at most; the cache
        holds `max_num_seqs * max_model_len` positions. None: 2048, or the model's own
        limit if that is less.
      eos_ids: tokens that end a request which names no others.
      prefill_lengths: prompt lengths to compile for; None: doubling up to
        `max_model_len`. A prompt longer than the largest is refused.

    Attributes:
      adapters: the names that requests may use.
      limits: sizes.

    Raises:
      ConfigError: naming every option that cannot work.

    Example::

        engine = Engine(model, manager, max_num_seqs=8, eos_ids=tokenizer.eos_ids)
        results = engine.generate([GenerationRequest("1", (1, 2, 3), lora="sql")])
    """

    def __init__(
        self,
        model: CausalLM,
        manager: LoRAModelManager | None = None,
        *,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        eos_ids: Iterable[int] = (),
        prefill_lengths: Sequence[int] | None = None,
    ) -> None:
        self.limits = engine_limits(
            model.config,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            prefill_lengths=prefill_lengths,
        )
        self.adapters = ServedAdapters(manager)
        self._eos_ids = frozenset(eos_ids)
        self._scheduler = Scheduler(
            max_num_seqs, self.adapters, patience=PATIENCE * max_num_seqs
        )
        self._batch = Batch(
            model,
            num_slots=self.adapters.num_slots,
            num_rows=max_num_seqs,
            num_positions=self.limits.max_model_len,
            lengths=self.limits.prefill_lengths,
        )
        self._queued: dict[str, GenerationRequest] = {}
        self._running: dict[int, Running] = {}
        self._news: list[TokenEvent] = []
        self._intake = Intake(self.limits, self.adapters)

    @property
    def has_work(self) -> bool:
        """Whether a request has not yet got its result from `step`."""
        return bool(self._intake.in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queued)

    @property
    def num_running(self) -> int:
        """Rows in use."""
        return len(self._running)

    def add_request(self, request: GenerationRequest) -> None:
        """Puts a request into the queue.

        Raises:
          RequestError: naming everything in it that cannot be served: an unknown
            adapter, an empty or too long prompt, a token outside the vocabulary, an id
            that is in flight. Nothing has changed then.
        """
        self._intake.check(request)
        self._intake.in_flight.add(request.request_id)
        if request.max_tokens == 0 and not request.prompt_logprobs:
            self._report_end(empty_result(request, FinishReason.LENGTH))
            return
        self._queued[request.request_id] = request
        self._scheduler.add(request.request_id, self._adapter_id(request))

    def cancel(self, request_id: str) -> bool:
        """Ends a request now; False if it is not in flight.

        The next `step` returns its result, with the tokens made so far.
        """
        request = self._queued.pop(request_id, None)
        if request is not None:
            self._scheduler.withdraw(request_id)
            self._report_end(empty_result(request, FinishReason.CANCELLED))
            return True
        for running in self._running.values():
            if running.request.request_id == request_id:
                self._report_end(self._finish(running, FinishReason.CANCELLED))
                return True
        return False

    def step(self) -> list[TokenEvent]:
        """Runs one jitted step and returns its news.

        If a row and a slot are free for waiting requests they are prefilled; otherwise
        every running row gets one more token. A request whose adapter cannot be loaded
        any more ends with an error; the others go on.
        """
        started = self._start_waiting()
        if started:
            self._prefill(started)
        elif self._running:
            self._decode()
        elif self._queued:
            self._refuse_waiting()
        news, self._news = self._news, []
        self._intake.in_flight -= {event.request_id for event in news if event.result}
        return news

    def generate(self, requests: Iterable[GenerationRequest]) -> list[GenerationResult]:
        """Runs requests to their end and returns their results in the same order.

        There may be more requests than rows, and more adapters than slots.

        Raises:
          RequestError: naming every request that cannot be served, before any runs; or
            if other requests are in flight (use `add_request` and `step` then).
        """
        wanted = list(requests)
        self._intake.check_all(wanted)
        results: dict[str, GenerationResult] = {}
        try:
            for request in wanted:
                self.add_request(request)
            while self.has_work:
                for event in self.step():
                    if event.result is not None:
                        results[event.request_id] = event.result
        finally:
            self._abandon_all()
        return [results[request.request_id] for request in wanted]

    def prompt_logits(self, requests: Sequence[GenerationRequest]) -> list[np.ndarray]:
        """Returns the float32 logits `(length, vocab)` of each request's prompt.

        Nothing is generated; requests in flight are not touched. All adapters must fit
        into the slots at once.

        Raises:
          RequestError: naming every request that cannot be served.
          RuntimeError: if an adapter can get no slot now.
        """
        self._intake.check_all(requests)
        claims: dict[int, Hold] = {}
        prompts = []
        try:
            for request in requests:
                id, adapter, slot = self._adapter_id(request), None, None
                if id is not None:
                    if id not in claims:
                        claims[id] = self.adapters.acquire(id)
                    adapter, slot = self.adapters.get(id), claims[id].slot
                prompts.append(seat(request, 0, adapter, slot).prompt())
            return self._batch.prompt_logits(self.adapters.bank, prompts)
        finally:
            for claim in claims.values():
                self.adapters.release(claim)

    def warmup(
        self, prompt_lengths: Iterable[int] | None = None, *, scored: bool = False
    ) -> None:
        """Compiles every program that requests with such prompts can need.

        Without it each program is compiled when it is first needed. Rows, cache and
        adapters stay as they are. If no adapter is registered yet, the writes to slots
        are compiled as well.

        Args:
          prompt_lengths: lengths of the prompts to come; None: all up to the limit.
          scored: whether some will ask for `prompt_logprobs`.
        """
        lengths = self.limits.prefill_lengths
        if prompt_lengths is not None:
            padded = {smallest_that_holds(n, lengths) for n in prompt_lengths}
            lengths = tuple(sorted(padded))
        self.adapters.warmup()
        self._batch.warmup(self.adapters.bank, lengths, scored=scored)

    def _start_waiting(self) -> list[Running]:
        admissions, refusals = self._scheduler.admit()
        for refusal in refusals:
            self._refuse(refusal.request_id, str(refusal.error))
        return [self._start(admission) for admission in admissions]

    def _start(self, admission: Admission) -> Running:
        request = self._queued.pop(admission.request_id)
        adapter = None
        if admission.adapter_id is not None:
            adapter = self.adapters.get(admission.adapter_id)
        running = seat(request, admission.row, adapter, admission.slot)
        self._running[admission.row] = running
        return running

    def _adapter_id(self, request: GenerationRequest) -> int | None:
        return None if request.lora is None else self.adapters.find(request.lora)

    def _prefill(self, started: Sequence[Running]) -> None:
        prompts = [running.prompt() for running in started]
        output = self._batch.prefill(self.adapters.bank, prompts)
        for running in started:
            if running.row in output.scores:
                running.take_scores(output.scores[running.row])
        self._take_tokens(started, output)

    def _decode(self) -> None:
        running_rows = list(self._running.values())
        facts = [running.next_facts() for running in running_rows]
        output = self._batch.decode(self.adapters.bank, facts)
        self._take_tokens(running_rows, output)

    def _take_tokens(self, rows: Sequence[Running], output: StepOutput) -> None:
        for running in rows:
            new = running.take_token(int(output.tokens[running.row]))
            reason = running.finish_reason(self._eos_ids, self.limits.max_model_len)
            result = None if reason is None else self._finish(running, reason)
            self._news.append(TokenEvent(running.request.request_id, new, result))

    def _finish(self, running: Running, reason: FinishReason) -> GenerationResult:
        self._scheduler.finish(running.row)
        del self._running[running.row]
        return running.result(reason)

    def _report_end(self, result: GenerationResult) -> None:
        self._news.append(TokenEvent(result.request_id, (), result))

    def _refuse(self, request_id: str, error: str) -> None:
        request = self._queued.pop(request_id)
        self._report_end(empty_result(request, FinishReason.ERROR, error))

    def _refuse_waiting(self) -> None:
        """Ends the queue: no row runs, so no slot will become free by itself."""
        for request_id, request in list(self._queued.items()):
            self._scheduler.withdraw(request_id)
            self._refuse(
                request_id,
                f"adapter {request.lora!r} can get no slot: all"
                f" {self.adapters.num_slots} are pinned or held by others; unpin one or"
                " raise max_loras.",
            )

    def _abandon_all(self) -> None:
        """After `generate`: leaves nothing in flight, also when it was interrupted."""
        for request_id in list(self._intake.in_flight):
            self.cancel(request_id)
        self._news.clear()
        self._intake.in_flight.clear()
