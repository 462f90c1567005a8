"""What adapters may replace of an embedding table or of a head: rows, or all of it.

    token_ids   (slots, tokens) int32      id + 1 of each replaced token, 0 for none
    token_rows  (slots, tokens, dim)       its new row
    table       (slots, vocab, dim)        the whole table, as a checkpoint stores it
    has_table   (slots, 1) int32           rows of the slot's table, 0 for none

Like `extras.py`, these enter a bank with the first adapter that brings them. A table is
as large as the base's, for each slot; an adapter that has added tokens brings a larger
one, and then all logits are as wide as the largest: minus infinity where a row's own
vocabulary ends.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters import AdapterPart, FullModule, TokenRows
from lora_jax.layers.base import HostSlot, SlotSpec

IDS, ROWS, TABLE, HAS_TABLE = "token_ids", "token_rows", "table", "has_table"
"""Names of the arrays."""


def rows_spec(key: str, values: np.ndarray, vocab: int) -> SlotSpec:
    """Returns the spec of one of this file's arrays, `{}` for another key.

    Places for tokens come in powers of two, so few adapters enlarge a bank.
    """
    if key not in (IDS, ROWS, TABLE, HAS_TABLE):
        return {}
    shape = values.shape
    if key in (IDS, ROWS):
        places = 1 << (shape[0] - 1).bit_length()
        shape = (places, *shape[1:])
    return {key: jax.ShapeDtypeStruct(shape, values.dtype)}


def rows_faults(part: TokenRows | FullModule, vocab: int, dim: int) -> list[str]:
    """Returns why rows or a table do not fit a `(vocab, dim)` base."""
    if isinstance(part, FullModule):
        shape = part.weight.shape
        if len(shape) != 2 or shape[0] < vocab or shape[1] != dim:
            return [
                f"the saved module has shape {shape}, the base's is ({vocab}, {dim}); "
                "a vocabulary may only have grown."
            ]
        return []
    found = []
    if part.rows.shape[1] != dim:
        found.append(f"the trained rows are {part.rows.shape[1]} wide, not {dim}.")
    beyond = [index for index in part.indices if not 0 <= index < vocab]
    if beyond:
        found.append(f"token ids {beyond} are outside the vocabulary of {vocab}.")
    return found


def pack_rows(part: AdapterPart, dtype: np.dtype) -> HostSlot:
    """Returns the host arrays of replaced rows or a table; `{}` for another part."""
    if isinstance(part, TokenRows):
        ids = np.asarray(part.indices, np.int32) + 1
        return {IDS: ids, ROWS: part.rows.astype(dtype)}
    if isinstance(part, FullModule):
        count = np.full(1, part.weight.shape[0], np.int32)
        return {TABLE: part.weight.astype(dtype), HAS_TABLE: count}
    return {}


def replaced_rows(
    rows: jax.Array, tokens: jax.Array, slot: jax.Array, slots: dict[str, jax.Array]
) -> jax.Array:
    """Returns embeddings `(rows, dim)` with the rows that each slot replaces.

    Args:
      rows: what the base table (and a low-rank update) gives.
      tokens: `(rows,)` token ids.
      slot: `(rows,)` bank slot, -1 for base rows, which stay as they are.
      slots: the layer's arrays.
    """
    at, adapted = jnp.maximum(slot, 0), slot >= 0
    if IDS in slots:
        same = (slots[IDS][at] == tokens[:, None] + 1) & adapted[:, None]
        new = slots[ROWS][at, jnp.argmax(same, axis=1)].astype(rows.dtype)
        rows = jnp.where(jnp.any(same, axis=1, keepdims=True), new, rows)
    if TABLE in slots:
        own = (slots[HAS_TABLE][at, 0] > 0) & adapted
        new = slots[TABLE][at, tokens].astype(rows.dtype)
        rows = jnp.where(own[:, None], new, rows)
    return rows


def replaced_logits(
    logits: jax.Array, hidden: jax.Array, slot: jax.Array, slots: dict[str, jax.Array]
) -> jax.Array:
    """Returns logits `(rows, vocab)` under the head rows that each slot replaces.

    A whole head costs one product over all rows for each slot that is in the batch.
    """
    if TABLE in slots:
        added = max(0, slots[TABLE].shape[1] - logits.shape[1])
        logits = jnp.pad(logits, [(0, 0), (0, added)], constant_values=-jnp.inf)
        for index in range(slots[TABLE].shape[0]):
            own = (slot == index) & (slots[HAS_TABLE][index, 0] > 0)
            whole = functools.partial(_whole_head, index)
            logits = jax.lax.cond(
                jnp.any(own), whole, _base_head, logits, hidden, own, slots
            )
    if IDS in slots:
        at, adapted = jnp.maximum(slot, 0), slot >= 0
        places = jnp.where(adapted[:, None], slots[IDS][at], 0) - 1
        new = jnp.einsum(
            "rd,rkd->rk", hidden, slots[ROWS][at], preferred_element_type=jnp.float32
        )
        # A place of -1 would count from the end; one past the end is dropped.
        places = jnp.where(places < 0, logits.shape[1], places)
        number = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        logits = logits.at[number, places].set(new.astype(logits.dtype), mode="drop")
    return logits


def _whole_head(
    index: int,
    logits: jax.Array,
    hidden: jax.Array,
    own: jax.Array,
    slots: dict[str, jax.Array],
) -> jax.Array:
    """Returns the logits with the `own` rows those of the slot's head."""
    new = jax.lax.dot_general(
        hidden,
        slots[TABLE][index],
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    number = jnp.arange(new.shape[1], dtype=jnp.int32)
    legal = (number < slots[HAS_TABLE][index, 0])[None, :]
    new = jnp.where(legal, new, -jnp.inf).astype(logits.dtype)
    return jnp.where(own[:, None], new, logits)


def _base_head(
    logits: jax.Array, hidden: jax.Array, own: jax.Array, slots: dict[str, jax.Array]
) -> jax.Array:
    return logits
