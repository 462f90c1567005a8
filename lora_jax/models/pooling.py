"""From the hidden states of a text's tokens to one vector for the text."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Hidden = Float[Array, "batch time d"]
Mask = Bool[Array, "batch time"]
Pooled = Float[Array, "batch d"]


def mean_pool(hidden: Hidden, mask: Mask) -> Pooled:
    """Returns the mean over the tokens that are not padding, float32; 0 for none."""
    wide = jnp.where(mask[:, :, None], hidden.astype(jnp.float32), 0.0)
    count = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    return jnp.sum(wide, axis=1) / count.astype(jnp.float32)


def cls_pool(hidden: Hidden, mask: Mask) -> Pooled:
    """Returns the first token's hidden state, float32."""
    del mask
    return hidden[:, 0].astype(jnp.float32)


def last_pool(hidden: Hidden, mask: Mask) -> Pooled:
    """Returns the hidden state of the last token that is not padding, float32."""
    positions = jnp.arange(mask.shape[1], dtype=jnp.int32)
    last = jnp.max(jnp.where(mask, positions[None, :], 0), axis=1)
    picked = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
    return picked[:, 0].astype(jnp.float32)


POOLINGS: Mapping[str, Callable[[Hidden, Mask], Pooled]] = {
    "mean": mean_pool,
    "cls": cls_pool,
    "last": last_pool,
}
"""The poolings of text embeddings."""


def normalize(vectors: Pooled) -> Pooled:
    """Returns the vectors at unit length; a zero vector stays zero."""
    length = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.maximum(length, 1e-12)


def folder_pooling(folder: Path) -> str | None:
    """Returns the pooling that a sentence-transformers folder asks for, if it says.

    Source: the `1_Pooling/config.json` that sentence-transformers writes.
    """
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    keys = {
        "mean": "pooling_mode_mean_tokens",
        "cls": "pooling_mode_cls_token",
        "last": "pooling_mode_lasttoken",
    }
    return next((kind for kind, key in keys.items() if values.get(key)), None)
