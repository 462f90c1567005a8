"""Arguments of `lora_delta` -> nothing, or one error that lists every fault."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from lora_kernels.routing import Routing, routing_faults

ArrayLike = jax.Array | jax.ShapeDtypeStruct


def check_arguments(
    x: ArrayLike,
    y: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    *,
    scale: ArrayLike,
    rank: ArrayLike,
    routing: Routing,
    part_widths: tuple[int, ...],
) -> None:
    """Checks shapes and dtypes, at trace time.

    Raises:
      ValueError: naming every argument whose shape or dtype does not fit the others.
    """
    if x.ndim != 2 or y.ndim != 2 or a.ndim != 4 or b.ndim != 3:
        raise ValueError(
            "lora_delta: expected x (tokens, d_in), y (tokens, d_out), a (slots, "
            "parts, max_rank, d_in), b (slots, max_rank, d_out); found "
            f"{x.shape}, {y.shape}, {a.shape}, {b.shape}."
        )
    tokens, d_in = x.shape
    slots, parts, max_rank, _ = a.shape
    expected = {
        "y": (y.shape, (tokens, sum(part_widths))),
        "a": (a.shape, (slots, len(part_widths), max_rank, d_in)),
        "b": (b.shape, (slots, max_rank, sum(part_widths))),
        "scale": (scale.shape, (slots, parts)),
        "rank": (rank.shape, (slots, parts)),
        "routing.slot": (routing.slot.shape, (tokens,)),
        "routing slots": ((routing.num_slots,), (slots,)),
    }
    found = [
        f"{name} is {has}, expected {wants}"
        for name, (has, wants) in expected.items()
        if has != wants
    ]
    found.extend(dtype_faults({"x": x, "y": y, "a": a, "b": b, "scale": scale}, rank))
    found.extend(f"routing.{fault}" for fault in routing_faults(routing))
    if found:
        raise ValueError(
            f"lora_delta: x {x.shape}, part_widths {part_widths}: {'; '.join(found)}."
        )


def dtype_faults(floats: dict[str, ArrayLike], rank: ArrayLike) -> Iterator[str]:
    """Yields what is wrong with the dtypes of float arrays and of rank."""
    for name, array in floats.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            yield f"{name} is {array.dtype}, expected a floating dtype"
    if not jnp.issubdtype(rank.dtype, jnp.integer):
        yield f"rank is {rank.dtype}, expected int32"
