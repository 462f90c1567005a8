"""The few shapes that a step is compiled for. Plain integers.

A prompt is padded to the next length, a group of new prompts to the next number of
rows; so the number of programs is small and known before the first request.
"""

from collections.abc import Sequence

from lora_jax.errors import ConfigError

SMALLEST_PREFILL = 16
"""Tokens. Below this the fixed cost of a call outweighs the padding."""

PREFILL_TOKENS = 2048
"""Padded tokens in one prefill call, at most (one prompt may exceed it): bounds the
memory for activations and how long running rows wait."""


def length_ladder(longest: int) -> tuple[int, ...]:
    """Returns doubling lengths up to `longest` tokens, which is the last.

    Example:
      >>> length_ladder(100)
      (16, 32, 64, 100)
    """
    lengths = []
    length = SMALLEST_PREFILL
    while length < longest:
        lengths.append(length)
        length *= 2
    return (*lengths, longest)


def check_ladder(lengths: Sequence[int], longest: int) -> tuple[int, ...]:
    """Returns `lengths` sorted, once each.

    Raises:
      ConfigError: if there is none, one is below 1, or one is above `longest`.
    """
    ladder = tuple(sorted(set(lengths)))
    if not ladder or ladder[0] < 1 or ladder[-1] > longest:
        raise ConfigError(
            f"prefill_lengths={list(lengths)}: expected one or more lengths between 1"
            f" and max_model_len={longest}."
        )
    return ladder


def smallest_that_holds(size: int, ladder: Sequence[int]) -> int:
    """Returns the first entry of an ascending ladder that is at least `size`."""
    return next(entry for entry in ladder if entry >= size)


def row_ladder(length: int, max_num_seqs: int) -> tuple[int, ...]:
    """Returns the numbers of rows that a prefill of `length` tokens is compiled for.

    Powers of 4 and the largest allowed, so that one new row costs one row.

    Example:
      >>> row_ladder(64, 16), row_ladder(1024, 16)
      ((1, 4, 16), (1, 2))
    """
    most = max(1, min(max_num_seqs, PREFILL_TOKENS // length))
    rows = []
    count = 1
    while count < most:
        rows.append(count)
        count *= 4
    return (*rows, most)


def split_rows(count: int, ladder: Sequence[int]) -> list[int]:
    """Returns row buckets that together hold `count` rows, at most half of one padded.

    Example:
      >>> split_rows(5, (1, 4, 16)), split_rows(9, (1, 4, 16))
      ([4, 1], [16])
    """
    buckets = []
    while count > 0:
        fitting = [rows for rows in ladder if rows <= count]
        above = [rows for rows in ladder if count < rows <= 2 * count]
        rows = above[0] if above and fitting[-1] != count else fitting[-1]
        buckets.append(rows)
        count -= rows
    return buckets
