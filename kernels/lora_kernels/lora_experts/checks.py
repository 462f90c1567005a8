"""Arguments of `lora_experts` -> nothing, or one error that lists every fault."""

from lora_kernels.lora_delta.checks import ArrayLike, dtype_faults
from lora_kernels.routing import Routing, routing_faults


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
    if x.ndim != 2 or y.ndim != 2 or a.ndim != 5 or b.ndim != 4:
        raise ValueError(
            "lora_experts: expected x (rows, d_in), y (pairs, d_out), a (slots, "
            "experts, parts, max_rank, d_in), b (slots, experts, max_rank, d_out); "
            f"found {x.shape}, {y.shape}, {a.shape}, {b.shape}."
        )
    rows, d_in = x.shape
    pairs = y.shape[0]
    slots, experts, parts, max_rank, _ = a.shape
    d_out = sum(part_widths)
    expected = {
        "y": (y.shape, (pairs, d_out)),
        "a": (a.shape, (slots, experts, len(part_widths), max_rank, d_in)),
        "b": (b.shape, (slots, experts, max_rank, d_out)),
        "scale": (scale.shape, (slots, experts, parts)),
        "rank": (rank.shape, (slots, experts, parts)),
        "routing.slot": (routing.slot.shape, (pairs,)),
        "routing slots": ((routing.num_slots,), (slots * experts,)),
    }
    found = [
        f"{name} is {has}, expected {wants}"
        for name, (has, wants) in expected.items()
        if has != wants
    ]
    if pairs % max(rows, 1) or (pairs > 0) != (rows > 0):
        found.append(f"y has {pairs} pairs, expected a multiple of x's {rows} rows")
    found.extend(dtype_faults({"x": x, "y": y, "a": a, "b": b, "scale": scale}, rank))
    found.extend(f"routing.{fault}" for fault in routing_faults(routing))
    if found:
        raise ValueError(
            f"lora_experts: x {x.shape}, part_widths {part_widths}: {'; '.join(found)}."
        )
