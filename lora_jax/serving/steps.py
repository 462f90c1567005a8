"""The jitted programs of the engine: prefill, decode, draw, score, head.

Each is a pure function of (weights, bank, rows, state): the routing is computed inside
from the rows' slots, so whoever changes the slot table or the bank between two calls
cannot change what a running call computes. Given no bank (None), a program does no LoRA
work: that is the variant for a call in which no row has an adapter.

    prefill   prompts `(rows, length)` -> logits after each; fills the cache's rows
    decode    last tokens `(batch,)` -> logits after each; adds a position to the cache
    draw      logits -> tokens, into the batch's last tokens
    score     hidden states of prompts -> log-probability of each prompt token
    head      hidden states of prompts -> all their logits
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lora_jax.bank import Bank
from lora_jax.forward import merge
from lora_jax.models.cache import KVCache, insert
from lora_jax.routing import RoutingSet, routing_from_slots
from lora_jax.serving.rows import StepRows
from lora_jax.serving.sampling import sample
from lora_jax.shapes import BASE_SLOT

SCORE_TOKENS = 128
"""Prompt tokens whose logits exist at one time: 25 MB for 49152 words in float32."""


@runtime_checkable
class Decoder(Protocol):
    """What the engine needs of a model; `lora_jax.models.CausalLM` has it."""

    def prefill(
        self, tokens: Int[Array, "batch time"]
    ) -> tuple[Float[Array, "batch time d"], KVCache]:
        """Hidden states, and the keys and values of positions 0 to time - 1."""
        ...

    def decode(
        self,
        tokens: Int[Array, " batch"],
        positions: Int[Array, " batch"],
        cache: KVCache,
    ) -> tuple[Float[Array, "batch d"], KVCache]:
        """Hidden states of one more token for each row; negative positions idle."""
        ...

    def logits(self, hidden: Float[Array, "*rows d"]) -> Float[Array, "*rows vocab"]:
        """Float32 logits."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Rebuilt:
    """The static half of a model: with its arrays it is the model again.

    The arrays travel as a flat list: jit flattens its arguments at every call, and a
    state of hundreds of variables costs it half a millisecond.

    Attributes:
      graphdef: from `lora_jax.split`.
      structure: of the weights.
      num_slots: slots of the bank; 0 if there is none.
    """

    graphdef: nnx.GraphDef
    structure: jax.tree_util.PyTreeDef
    num_slots: int

    def __call__(
        self, weights: Sequence[Array], bank: Bank | None, routing: RoutingSet
    ) -> Decoder:
        """Returns the model with these arrays; the bare base model without a bank."""
        state = jax.tree.unflatten(self.structure, weights)
        if bank is None:
            return cast(Decoder, nnx.merge(self.graphdef, state))
        return cast(Decoder, merge(self.graphdef, state, bank, routing))


class Steps:
    """The engine's programs for one model and one bank layout.

    Every program but `draw` takes the flat weights first, then the bank or None.
    """

    def __init__(self, rebuilt: Rebuilt) -> None:
        # Drawing is a program of its own: it costs a second to compile, and so it is
        # compiled once for each number of rows, not for each prompt length too.
        self.draw = jax.jit(_draw)
        prefill, decode, score, head = (
            functools.partial(step, rebuilt)
            for step in (_prefill, _decode, _score, _head)
        )
        self.prefill = jax.jit(prefill, donate_argnames="cache")
        self.decode = jax.jit(decode, donate_argnames="cache")
        self.score = jax.jit(score)
        self.head = jax.jit(head)


def _prefill(
    rebuilt: Rebuilt,
    weights: Sequence[Array],
    bank: Bank | None,
    cache: KVCache,
    prompts: Int[Array, "rows length"],
    rows: StepRows,
) -> tuple[Float[Array, "rows vocab"], KVCache, Float[Array, "rows length d"]]:
    """Returns the logits after each prompt, the filled cache, and hidden states.

    Tokens behind a prompt's end are padding: they are base rows of the LoRA layers,
    causal attention hides them, and decode overwrites what they left in the cache.
    """
    routing = (
        _prompt_routing(prompts.shape[1], rebuilt.num_slots, rows)
        if bank is not None
        else {}
    )
    model = rebuilt(weights, bank, routing)
    hidden, prefilled = model.prefill(prompts)
    last = jnp.take_along_axis(hidden, rows.position[:, None, None], axis=1)[:, 0]
    return model.logits(last), insert(cache, jnp.asarray(rows.row), prefilled), hidden


def _decode(
    rebuilt: Rebuilt,
    weights: Sequence[Array],
    bank: Bank | None,
    cache: KVCache,
    tokens: Int[Array, " batch"],
    rows: StepRows,
) -> tuple[Float[Array, "batch vocab"], KVCache]:
    """Returns the logits after each row's token, and the cache; idle rows keep it."""
    slots = jnp.asarray(rows.slot)
    routing = _row_routing(rebuilt.num_slots, slots) if bank is not None else {}
    model = rebuilt(weights, bank, routing)
    hidden, cache = model.decode(tokens, jnp.asarray(rows.position), cache)
    return model.logits(hidden), cache


def _draw(
    tokens: Int[Array, " batch"], logits: Float[Array, "rows vocab"], rows: StepRows
) -> Int[Array, " batch"]:
    """Returns the batch's last tokens with one new token for each row that is no idler.

    Rows outside the batch are dropped.
    """
    place = jnp.where(rows.position >= 0, rows.row, tokens.shape[0])
    return tokens.at[place].set(sample(logits, rows.sampling), mode="drop")


def _score(
    rebuilt: Rebuilt,
    weights: Sequence[Array],
    bank: Bank | None,
    hidden: Float[Array, "rows length d"],
    prompts: Int[Array, "rows length"],
    rows: StepRows,
) -> Float[Array, "rows length"]:
    """Returns at `[r, t]` the log-probability of prompt token t + 1 of row r.

    The last column scores nothing (there is no next token). Logits are made for
    `SCORE_TOKENS` tokens at a time, so memory does not grow with the prompts.
    """
    num_rows, length, width = hidden.shape
    next_tokens = jnp.roll(prompts, -1, axis=1).reshape(-1)
    token_slots = _slots_by_place(length, rows).reshape(-1)
    padding = -(num_rows * length) % SCORE_TOKENS

    def chunked(values: Array, fill: int) -> Array:
        pads = [(0, padding)] + [(0, 0)] * (values.ndim - 1)
        padded = jnp.pad(values, pads, constant_values=fill)
        return padded.reshape(-1, SCORE_TOKENS, *values.shape[1:])

    def score_chunk(chunk: tuple[Array, Array, Array]) -> Array:
        states, targets, chunk_slots = chunk
        routing = (
            _row_routing(rebuilt.num_slots, chunk_slots) if bank is not None else {}
        )
        logits = rebuilt(weights, bank, routing).logits(states)
        target = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return target - jax.nn.logsumexp(logits, axis=1)

    chunks = (
        chunked(hidden.reshape(-1, width), 0),
        chunked(next_tokens, 0),
        chunked(token_slots, BASE_SLOT),
    )
    scores = jax.lax.map(score_chunk, chunks).reshape(-1)
    return scores[: num_rows * length].reshape(num_rows, length)


def _head(
    rebuilt: Rebuilt,
    weights: Sequence[Array],
    bank: Bank | None,
    hidden: Float[Array, "rows length d"],
    rows: StepRows,
) -> Float[Array, "rows length vocab"]:
    """Returns the logits of every position."""
    num_rows, length, width = hidden.shape
    slots = _slots_by_place(length, rows).reshape(-1)
    routing = _row_routing(rebuilt.num_slots, slots) if bank is not None else {}
    model = rebuilt(weights, bank, routing)
    flat = model.logits(hidden.reshape(-1, width))
    return flat.reshape(num_rows, length, -1)


def _prompt_routing(length: int, num_slots: int, rows: StepRows) -> RoutingSet:
    """Routing of all tokens of a prefill, and of the last token of each prompt."""
    places = jnp.arange(length, dtype=jnp.int32)[None, :]
    inside = places <= rows.position[:, None]
    token_slots = jnp.where(inside, _slots_by_place(length, rows), BASE_SLOT)
    return routing_from_slots(
        token_slots.reshape(-1), num_slots, prompt_slots=jnp.asarray(rows.slot)
    )


def _slots_by_place(length: int, rows: StepRows) -> Int[Array, "rows length"]:
    """Slot of each position: the row's, from where its adapter begins to act."""
    places = jnp.arange(length, dtype=jnp.int32)[None, :]
    acts = places >= rows.start[:, None]
    return jnp.where(acts, rows.slot[:, None], BASE_SLOT)


def _row_routing(num_slots: int, slots: Int[Array, " rows"]) -> RoutingSet:
    """Routing of a step in which each row is one token, and each is sampled."""
    return routing_from_slots(slots, num_slots, prompt_slots=slots)
