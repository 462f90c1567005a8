"""`triton`, with a row's bits independent of the other rows of the batch."""

from jaxtyping import Array, Float, Int32

from lora_kernels.lora_delta.triton import checked_call, delta
from lora_kernels.routing import Routing


def lora_delta(
    x: Float[Array, "rows d_in"],
    y: Float[Array, "tokens d_out"],
    a: Float[Array, "slots parts max_rank d_in"],
    b: Float[Array, "slots max_rank d_out"],
    *,
    scale: Float[Array, "slots parts"],
    rank: Int32[Array, "slots parts"],
    routing: Routing,
    part_widths: tuple[int, ...],
) -> Float[Array, "tokens d_out"]:
    """Returns `y` plus each token's low-rank update; see `api.lora_delta`."""
    call = checked_call(x, y, a, b, scale, rank, routing, part_widths)
    return delta(x, y, call, vector_rows=0)
