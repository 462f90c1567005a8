"""Texts in, one vector each out: embeddings or classification scores, many adapters.

    texts -> groups of at most `max_loras` adapters -> padded batches -> one jitted step
          -> one row of numbers a text, in the order of the texts

It works on token ids. A group's adapters are held while it runs, so any number of
adapters may be given; base rows never wait for a slot.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from lora_jax.bank import Bank
from lora_jax.errors import RequestError
from lora_jax.forward import merge, split
from lora_jax.manager import LoRAModelManager
from lora_jax.models import POOLINGS, Model, body_of
from lora_jax.routing import activation_start, routing_from_slots
from lora_jax.serving.adapters import ServedAdapters
from lora_jax.serving.buckets import length_ladder, smallest_that_holds
from lora_jax.shapes import BASE_SLOT
from lora_jax.slots import Hold


@dataclasses.dataclass(frozen=True)
class Text:
    """One text as token ids.

    Attributes:
      token_ids: at least one.
      token_types: segment of each token, 0 or 1; a pair has two. () means all 0.
      lora: name of its adapter; None for the base model.
    """

    token_ids: tuple[int, ...]
    token_types: tuple[int, ...] = ()
    lora: str | None = None


Score = Callable[[nnx.Module, Array, Array, Array], Array]
"""(model, tokens, mask, token types) -> `(batch, width)`."""


class TextEngine:
    """Runs texts through a model that gives each of them one row of numbers.

    Args:
      model: an encoder, decoder or classifier; with a manager, the one that it wraps.
      score: what to compute; see `embed_with` and `classify`.
      manager: keeps the adapters; None for the base model alone.
      max_num_seqs: texts in one step.
      max_len: longest text in tokens.

    Attributes:
      adapters: the names that texts may use.
    """

    def __init__(
        self,
        model: Model,
        score: Score,
        manager: LoRAModelManager | None = None,
        *,
        max_num_seqs: int = 16,
        max_len: int = 512,
    ) -> None:
        self.adapters = ServedAdapters(manager)
        self._rows = max_num_seqs
        self._lengths = length_ladder(max_len)
        graphdef, self._weights = split(model)
        slots = self.adapters.num_slots

        def step(
            weights: nnx.State, bank: Bank | None, batch: "_Padded", *, lora: bool
        ) -> Array:
            routing = batch.routing(slots) if lora else {}
            if bank is None:
                merged = nnx.merge(graphdef, weights)
            else:
                merged = merge(graphdef, weights, bank, routing)
            tokens, types = jnp.asarray(batch.tokens), jnp.asarray(batch.types)
            return score(merged, tokens, batch.mask(), types)

        self._step = jax.jit(step, static_argnames="lora")

    def run(self, texts: Sequence[Text]) -> list[np.ndarray]:
        """Returns one float32 row for each text, in their order.

        Raises:
          RequestError: if a text names an adapter that is not known.
          AdapterError: if an adapter's folder cannot be read any more.
        """
        found: dict[int, np.ndarray] = {}
        for group in self._groups(texts):
            for number, row in self._run_group(texts, group):
                found[number] = row
        return [found[number] for number in range(len(texts))]

    def _groups(self, texts: Sequence[Text]) -> Iterator[list[int]]:
        """Numbers of texts, cut so that no group needs more adapters than slots."""
        group: list[int] = []
        names: set[str] = set()
        for number, text in enumerate(texts):
            wanted = names | ({text.lora} if text.lora else set())
            if len(wanted) > self.adapters.num_slots:
                yield group
                group, wanted = [], {text.lora} if text.lora else set()
            group.append(number)
            names = wanted
        if group:
            yield group

    def _run_group(
        self, texts: Sequence[Text], group: list[int]
    ) -> Iterator[tuple[int, np.ndarray]]:
        claims: dict[str, Hold] = {}
        try:
            for number in group:
                name = texts[number].lora
                if name is not None and name not in claims:
                    claims[name] = self.adapters.acquire(self._id_of(name))
            bank = self.adapters.bank
            by_length = sorted(group, key=lambda number: len(texts[number].token_ids))
            for first in range(0, len(by_length), self._rows):
                numbers = by_length[first : first + self._rows]
                rows = [
                    self._placed(texts[number], {n: c.slot for n, c in claims.items()})
                    for number in numbers
                ]
                lora = any(slot != BASE_SLOT for _, slot, _ in rows)
                padded = _pad(rows, self._rows, self._lengths)
                out = self._step(self._weights, bank, padded, lora=lora)
                yield from zip(numbers, np.asarray(out), strict=False)
        finally:
            for claim in claims.values():
                self.adapters.release(claim)

    def _id_of(self, name: str) -> int:
        adapter_id = self.adapters.find(name)
        if adapter_id is None:
            raise RequestError(self.adapters.unknown(name))
        return adapter_id

    def _placed(self, text: Text, slots: dict[str, int]) -> tuple[Text, int, int]:
        """A text, its slot, and the first token on which its adapter acts."""
        if text.lora is None:
            return text, BASE_SLOT, 0
        invocation = self.adapters.get(self._id_of(text.lora)).invocation_tokens
        start = activation_start(text.token_ids, invocation)
        return (
            (text, BASE_SLOT, 0) if start is None else (text, slots[text.lora], start)
        )


def embed_with(pooling: str, *, unit_length: bool) -> Score:
    """Returns the score that embeds texts.

    Args:
      pooling: "mean", "cls" or "last".
      unit_length: whether vectors are divided by their length.
    """
    pool = POOLINGS[pooling]

    def embed(model: nnx.Module, tokens: Array, mask: Array, types: Array) -> Array:
        body: Any = body_of(model)  # type: ignore[arg-type]
        vectors = pool(body(tokens, mask, types), mask)
        if unit_length:
            length = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
            vectors = vectors / jnp.maximum(length, 1e-12)
        return vectors

    return embed


def classify(model: Any, tokens: Array, mask: Array, types: Array) -> Array:
    """Returns raw float32 label scores; columns beyond a row's own labels are -inf."""
    return model(tokens, mask, types)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Padded:
    """A batch of texts, padded; rows of padding have length 0."""

    tokens: Int[Array | np.ndarray, "rows length"]
    types: Int[Array | np.ndarray, "rows length"]
    facts: Int[Array | np.ndarray, "3 rows"]
    """Length, slot and start of each row."""

    def mask(self) -> Bool[Array, "rows length"]:
        places = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None, :]
        return places < self.facts[0][:, None]

    def routing(self, num_slots: int):
        lengths, slots, starts = jnp.asarray(self.facts)
        places = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None, :]
        acts = (places >= starts[:, None]) & (places < lengths[:, None])
        token_slots = jnp.where(acts, slots[:, None], BASE_SLOT).reshape(-1)
        return routing_from_slots(token_slots, num_slots, prompt_slots=slots)


def _pad(
    rows: Sequence[tuple[Text, int, int]], num_rows: int, lengths: Sequence[int]
) -> _Padded:
    longest = max(len(text.token_ids) for text, _, _ in rows)
    shape = (num_rows, smallest_that_holds(longest, lengths))
    tokens, types = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    facts = np.zeros((3, num_rows), np.int32)
    facts[1] = BASE_SLOT
    for row, (text, slot, start) in enumerate(rows):
        length = len(text.token_ids)
        tokens[row, :length] = text.token_ids
        types[row, : len(text.token_types)] = text.token_types
        facts[:, row] = length, slot, start
    return _Padded(tokens, types, facts)
