"""Grouped-query attention as pure functions: scores, softmax, and who sees whom.

Keys and values are never repeated for the query heads that share them: queries carry a
group axis instead.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

QUERY_BLOCK = 1024
"""Queries of a long text that are scored at once: 1 GiB of scores for 32 heads of 8192
tokens; more blocks make the program longer."""


def attend(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch kv_heads positions head_dim"],
    v: Float[Array, "batch kv_heads positions head_dim"],
    seen: Bool[Array, "#batch #time positions"],
    *,
    scale: float,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
) -> Float[Array, "batch time heads*head_dim"]:
    """Returns softmax(q k) v for each head; scores and softmax are float32.

    Args:
      q: `heads` is a multiple of `kv_heads`; neighbours share a key head.
      seen: which positions each query sees; each must see at least one.
      scale: what scores are multiplied with.
      softcap: if given, scores become `softcap * tanh(score / softcap)`.
      sinks: if given, each head's score for attending to nothing.
    """
    batch, time, heads, head_dim = q.shape
    grouped = q.reshape(batch, time, k.shape[1], heads // k.shape[1], head_dim)
    scores = scale * jnp.einsum(
        "btkgd,bksd->bkgts", grouped, k, preferred_element_type=jnp.float32
    )
    if softcap is not None:
        scores = cap(scores, softcap)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    else:
        by_group = sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
        weights = softmax_beside(scores, by_group).astype(q.dtype)
    # In the order of the product's own axes: XLA's CPU products with the values as the
    # left operand, which the other order asks for, take four times as long in decode.
    mixed = jnp.einsum("bkgts,bksd->bkgtd", weights, v)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, time, heads * head_dim)


def causal_attend(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch kv_heads time head_dim"],
    v: Float[Array, "batch kv_heads time head_dim"],
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
    block: int = QUERY_BLOCK,
) -> Float[Array, "batch time heads*head_dim"]:
    """Returns `attend` of a text to itself, each token to itself and those before.

    Long texts are done a block of queries at a time against the keys that the block
    can see: the scores of a whole long text would not fit into memory.

    Args:
      window: how many positions a token sees, itself included; `None` sees all before.
      scale, softcap, sinks: as in `attend`.
      block: queries at a time.
    """
    batch, time, heads, head_dim = q.shape
    if time == 0:
        return q.reshape(batch, 0, heads * head_dim)
    mixed = []
    for start in range(0, time, block):
        end = min(start + block, time)
        first = 0 if window is None else max(0, start - window + 1)
        own = jnp.arange(start, end, dtype=jnp.int32)
        seen = _between(own, jnp.arange(first, end, dtype=jnp.int32), window)
        keys, values = k[:, :, first:end], v[:, :, first:end]
        queries = q[:, start:end]
        mixed.append(
            attend(
                queries,
                keys,
                values,
                seen[None],
                scale=scale,
                softcap=softcap,
                sinks=sinks,
            )
        )
    return mixed[0] if len(mixed) == 1 else jnp.concatenate(mixed, axis=1)


def cap(x: Float[Array, "..."], bound: float) -> Float[Array, "..."]:
    """Returns `x` squeezed smoothly between `-bound` and `bound`."""
    return bound * jnp.tanh(x / bound)


def softmax_beside(
    scores: Float[Array, "*rows columns"], beside: Float[Array, "*#rows 1"]
) -> Float[Array, "*rows columns"]:
    """Returns the softmax of `scores` with one more column, less that column."""
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), beside)
    # The result is the same for any `top`, so no gradient need pass through it.
    top = jax.lax.stop_gradient(top)
    raised = jnp.exp(scores - top)
    total = jnp.sum(raised, axis=-1, keepdims=True) + jnp.exp(beside - top)
    return raised / total


def counted_positions(time: int) -> Int[Array, "1 time"]:
    """Returns `0 .. time-1`, the positions of a text from its beginning."""
    return jax.lax.broadcasted_iota(jnp.int32, (1, time), 1)


def seen_in_cache(
    positions: Int[Array, " batch"], length: int, window: int | None
) -> Bool[Array, "batch 1 length"]:
    """Returns which cached position each row sees; an idle row sees the first one.

    An idle row's output is never read; seeing something keeps it free of NaN.
    """
    cached = jnp.arange(length, dtype=jnp.int32)
    return _between(jnp.maximum(positions, 0), cached, window)[:, None]


def _between(
    own: Int[Array, " rows"], other: Int[Array, " columns"], window: int | None
) -> Bool[Array, "rows columns"]:
    distance = own[:, None] - other[None, :]
    if window is None:
        return distance >= 0
    return (distance >= 0) & (distance < window)
