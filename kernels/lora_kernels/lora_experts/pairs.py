"""Slot of each token and the experts it chose -> the routing of (token, expert) pairs.

Token t with k choices makes the pairs t * k ... t * k + k - 1. A pair belongs to one
*virtual slot*, so that an adapter's experts are to a kernel what adapters are:

    virtual slot      0   1  ...  E-1 |  E  E+1  ...  2E-1 | ...
    slot, expert    0,0 0,1 ... 0,E-1 | 1,0 1,1  ... 1,E-1 | ...

Computed in each layer, as each has its own router. So where few pairs meet many virtual
slots, most of them alone, every pair is a work item (`block` is 1), and a backend need
not sort them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Integer

from lora_kernels.routing import (
    BASE_SLOT,
    Routing,
    in_range_or_base,
    make_routing,
    routing_faults,
)

SINGLE = 4
"""Pairs are not grouped if there are so many virtual slots for each. vLLM's is 8."""


def pair_routing(
    routing: Routing, expert: Integer[Array, " pairs"], num_experts: int
) -> Routing:
    """Returns the routing of pairs over `slots * num_experts` virtual slots; jit-able.

    Args:
      routing: the routing of the tokens.
      expert: expert of each pair, k in turn for each token. One outside
        `[0, num_experts)` is not here: its pair is a base row, as are a base row's.
      num_experts: experts that the slot arrays hold, at least 1 (static).
    Raises:
      ValueError: if there is no expert, not the same number of pairs for each token,
        or a field of `routing` does not fit its others.

    Example:
      >>> import jax.numpy as jnp
      >>> tokens = make_routing(jnp.array([1, -1, 0]), 2)
      >>> expert = jnp.array([0, 3, 0, 1, 4, 2])
      >>> pair_routing(tokens, expert, 4).slot.tolist()
      [4, 7, -1, -1, -1, 2]
    """
    tokens, pairs = routing.slot.size, expert.size
    chosen = pairs // max(tokens, 1)
    found = [f"routing.{fault}" for fault in routing_faults(routing)]
    if num_experts < 1 or pairs != tokens * chosen:
        found.append(
            "expected at least one expert, and as many pairs for each token; found "
            f"num_experts={num_experts}, {pairs} pairs, {tokens} tokens"
        )
    if expert.ndim != 1 or not jnp.issubdtype(expert.dtype, jnp.integer):
        found.append(
            f"expert is {expert.dtype} {expert.shape}, expected integers (pairs,)"
        )
    if found:
        raise ValueError(f"pair_routing: {'; '.join(found)}.")
    slot = jnp.repeat(routing.slot, chosen)
    expert = in_range_or_base(expert, num_experts)
    here = (expert >= 0) & (slot >= 0)
    virtual = jnp.where(here, slot * num_experts + expert, BASE_SLOT)
    return make_routing(
        virtual,
        routing.num_slots * num_experts,
        weight=jnp.repeat(routing.weight, chosen),
        block=1 if SINGLE * pairs <= routing.num_slots * num_experts else routing.block,
    )
