"""The device's half of the engine: weights, cache and last tokens of all rows.

It runs the programs of `steps.py` on padded groups of rows and reads their tokens once
a step. It knows rows and slots, not requests, queues or adapter names.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from lora_jax.bank import Bank
from lora_jax.forward import split
from lora_jax.models import CausalLM, KVCache, empty_cache
from lora_jax.serving.buckets import row_ladder, smallest_that_holds, split_rows
from lora_jax.serving.rows import RowFacts, StepRows, pack_rows
from lora_jax.serving.steps import Rebuilt, Steps
from lora_jax.shapes import BASE_SLOT

PAD_TOKEN = 0
"""Any id of the vocabulary: nothing that comes of a pad token is used."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt that takes a row: its tokens, and whether to score them."""

    token_ids: tuple[int, ...]
    facts: RowFacts
    scored: bool

    def outside(self, num_rows: int) -> "Prompt":
        """Returns it at a row that does not exist: what it writes is dropped."""
        facts = dataclasses.replace(self.facts, row=num_rows)
        return dataclasses.replace(self, facts=facts)


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What a step left on the host.

    Attributes:
      tokens: `(batch,)` int32, the newest token of each row.
      scores: row -> `(length,)` float32; entry t is the log-probability of prompt
        token t + 1. Only rows that asked.
    """

    tokens: np.ndarray
    scores: dict[int, np.ndarray]


class Batch:
    """The rows' device state; every method leaves all programs' shapes as they are.

    Args:
      model: the decoder.
      num_slots: slots of the bank; 0 without one.
      num_rows: rows of the batch.
      num_positions: longest sequence.
      lengths: prompt lengths to pad to, ascending; the last is at most
        `num_positions`.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        num_slots: int,
        num_rows: int,
        num_positions: int,
        lengths: Sequence[int],
    ) -> None:
        graphdef, weights = split(model)
        self._weights, structure = jax.tree.flatten(weights)
        self._steps = Steps(Rebuilt(graphdef, structure, num_slots))
        self._num_rows = num_rows
        self._lengths = lengths
        dtype = model.model.embed_tokens.embedding.dtype
        cache = empty_cache(model.config, num_rows, num_positions, dtype)
        # Bound to its device from the start, as it is once a step has returned it: a
        # program for arrays that may move compiles again for arrays that may not.
        place = _beside(self._weights[0])
        self._cache: KVCache = jax.device_put(cache, place)
        self._tokens = jax.device_put(jnp.zeros((num_rows,), jnp.int32), place)

    def prefill(self, bank: Bank | None, prompts: Sequence[Prompt]) -> StepOutput:
        """Fills the prompts' rows and draws each one's first token.

        Prompts of one padded length share calls; the calls are dispatched without
        waiting and read together.
        """
        pending: list[tuple[list[Prompt], jax.Array]] = []
        for length, group in self._by_length(prompts).items():
            for size in split_rows(len(group), row_ladder(length, self._num_rows)):
                chunk, group = group[:size], group[size:]
                used = bank if _any_lora([prompt.facts for prompt in chunk]) else None
                hidden, padded, rows = self._prefill(used, chunk, length, size)
                if any(prompt.scored for prompt in chunk):
                    scores = self._steps.score(
                        self._weights, used, hidden, padded, rows
                    )
                    pending.append((chunk, scores))
        tokens, found = jax.device_get(
            (self._tokens, [scores for _, scores in pending])
        )
        scores = {
            prompt.facts.row: chunk_scores[index, : len(prompt.token_ids) - 1]
            for (chunk, _), chunk_scores in zip(pending, found, strict=True)
            for index, prompt in enumerate(chunk)
            if prompt.scored
        }
        return StepOutput(tokens, scores)

    def decode(self, bank: Bank | None, facts: Sequence[RowFacts]) -> StepOutput:
        """Feeds each given row's newest token and draws its next; others stay."""
        rows = [RowFacts(row) for row in range(self._num_rows)]
        for fact in facts:
            rows[fact.row] = fact
        self._decode(bank if _any_lora(facts) else None, rows)
        return StepOutput(jax.device_get(self._tokens), {})

    def prompt_logits(
        self, bank: Bank | None, prompts: Sequence[Prompt]
    ) -> list[np.ndarray]:
        """Returns each prompt's logits `(length, vocab)`; no row of the batch changes.

        With a bank, base rows too run in the program with LoRA, as in a mixed batch.
        """
        found: list[np.ndarray] = []
        for length, group in self._by_length(prompts).items():
            for size in split_rows(len(group), row_ladder(length, self._num_rows)):
                chunk, group = group[:size], group[size:]
                outside = [p.outside(self._num_rows) for p in chunk]
                hidden, _, rows = self._prefill(bank, outside, length, size)
                logits = self._steps.head(self._weights, bank, hidden, rows)
                found += _rows_of(jax.device_get(logits), chunk)
        order = [p for group in self._by_length(prompts).values() for p in group]
        places = {
            id(prompt): logits for prompt, logits in zip(order, found, strict=True)
        }
        return [places[id(prompt)] for prompt in prompts]

    def warmup(
        self, bank: Bank | None, lengths: Sequence[int], *, scored: bool
    ) -> None:
        """Runs every program once on rows outside the batch, so that it is compiled."""
        nobody = RowFacts(self._num_rows, position=0)
        for used in (None,) if bank is None else (None, bank):
            self._decode(used, [RowFacts(0)] * self._num_rows)
            for length in lengths:
                for size in row_ladder(length, self._num_rows):
                    chunk = [Prompt((PAD_TOKEN,), nobody, scored)]
                    hidden, padded, rows = self._prefill(used, chunk, length, size)
                    if scored:
                        self._steps.score(self._weights, used, hidden, padded, rows)
        jax.block_until_ready(self._tokens)

    def _by_length(self, prompts: Sequence[Prompt]) -> dict[int, list[Prompt]]:
        groups: dict[int, list[Prompt]] = {}
        for prompt in prompts:
            length = smallest_that_holds(len(prompt.token_ids), self._lengths)
            groups.setdefault(length, []).append(prompt)
        return groups

    def _decode(self, bank: Bank | None, rows: Sequence[RowFacts]) -> None:
        packed = pack_rows(rows)
        logits, self._cache = self._steps.decode(
            self._weights,
            bank,
            cache=self._cache,
            tokens=self._tokens,
            rows=packed,
        )
        self._tokens = self._steps.draw(self._tokens, logits, packed)

    def _prefill(
        self,
        bank: Bank | None,
        chunk: Sequence[Prompt],
        length: int,
        size: int,
    ) -> tuple[jax.Array, np.ndarray, StepRows]:
        """Runs one padded group; pad rows lie outside the batch and are dropped."""
        padded = np.full((size, length), PAD_TOKEN, np.int32)
        for index, prompt in enumerate(chunk):
            padded[index, : len(prompt.token_ids)] = prompt.token_ids
        pads = [RowFacts(self._num_rows, position=0)] * (size - len(chunk))
        rows = pack_rows([*(prompt.facts for prompt in chunk), *pads])
        logits, self._cache, hidden = self._steps.prefill(
            self._weights,
            bank,
            cache=self._cache,
            prompts=padded,
            rows=rows,
        )
        self._tokens = self._steps.draw(self._tokens, logits, rows)
        return hidden, padded, rows


def _beside(array: jax.Array) -> Sharding:
    """Returns where to put what belongs to an array: whole, on each of its devices."""
    if isinstance(array.sharding, NamedSharding):
        return NamedSharding(array.sharding.mesh, PartitionSpec())
    return array.sharding


def _rows_of(logits: np.ndarray, prompts: Sequence[Prompt]) -> list[np.ndarray]:
    return [
        row[: len(prompt.token_ids)]
        for row, prompt in zip(logits, prompts, strict=False)
    ]


def _any_lora(facts: Sequence[RowFacts]) -> bool:
    return any(fact.slot != BASE_SLOT for fact in facts)
