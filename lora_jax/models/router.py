"""From a router's scores to each token's experts and their weights.

Rounded where transformers rounds. Of equal scores the lower expert goes first; torch
promises no order.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lora_jax.models.experts_config import ExpertsConfig

Choice = tuple[Int[Array, "tokens k"], Float[Array, "tokens k"]]
"""Experts of each token, and their weights in float32."""


def choose(scores: Float[Array, "tokens experts"], config: ExpertsConfig) -> Choice:
    """Returns the experts of each token, the heaviest first, and their weights.

    Args:
      scores: what the router's linear layer returned.
      config: how many experts a token has, and how their weights are made.
    """
    chosen, weights = CHOICES[config.choice](scores, config.num_experts_per_tok)
    if config.normalized:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    if config.rounded:
        weights = weights.astype(scores.dtype).astype(jnp.float32)
    return chosen, weights


def softmax_top(scores: Float[Array, "tokens experts"], k: int) -> Choice:
    """Returns the `k` largest of all experts' probabilities."""
    probabilities = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, k)
    return chosen, weights


def top_softmax(scores: Float[Array, "tokens experts"], k: int) -> Choice:
    """Returns the `k` largest scores as probabilities among themselves."""
    largest, chosen = jax.lax.top_k(scores, k)
    return chosen, jax.nn.softmax(largest.astype(jnp.float32), axis=-1)


CHOICES: Mapping[str, Callable[[Array, int], Choice]] = {
    "softmax_top": softmax_top,
    "top_softmax": top_softmax,
}
"""The values of `ExpertsConfig.choice`."""
