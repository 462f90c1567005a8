"""What users of PyTorch have, as timed functions for the benchmark; needs torch.

torch_gather   index the slot arrays by row, two einsums (vLLM's CPU path)
torch_groups   a Python loop over the slots that have rows

Which rows belong to which slot is found before, as for the other implementations.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Array

from lora_kernels.lora_delta.bench_pool import Pool
from lora_kernels.lora_delta.specs import Spec

FORMS = ("torch_gather", "torch_groups")
"""Names of the forms, as the benchmark prints them."""

MOST_GATHERED = 2**32
"""Bytes of A and of B gathered for the rows, at most, lest memory run out."""


def is_installed() -> bool:
    """Returns whether torch can be imported."""
    return importlib.util.find_spec("torch") is not None


def prepare(form: str, spec: Spec, pool: Pool) -> Callable[[], None]:
    """Returns a function that computes an op with each set, in place into one y.

    Raises:
      ImportError: if torch is not installed.
      NotImplementedError: if what is gathered would not fit into memory.
    """
    import torch

    gathered = spec.tokens * spec.rank_axis * max(spec.d_in, *spec.part_widths)
    gathered *= pool.x.dtype.itemsize
    if form == "torch_gather" and gathered > MOST_GATHERED:
        raise NotImplementedError(
            f"would gather {gathered} bytes; at most {MOST_GATHERED}"
        )
    x, y, scale, weight = map(
        _tensor, (pool.x, pool.y, pool.scale, pool.routing.weight)
    )
    y = y.clone()
    banks = [(_tensor(a), _tensor(b)) for a, b in pool.banks]
    stops = np.cumsum(spec.part_widths).tolist()
    parts = list(zip([0, *stops[:-1]], stops, strict=True))
    slot = torch.from_numpy(pool.slot.astype(np.int64))
    rank = np.asarray(pool.rank).tolist()
    step = {
        "torch_gather": _gather_step(x, y, scale, weight, slot, parts),
        "torch_groups": _groups_step(x, y, scale, weight, slot, parts, rank),
    }[form]

    @torch.inference_mode()
    def run() -> None:
        for i in range(pool.ops):
            step(*banks[i % len(banks)])

    return run


def _tensor(array: Array) -> Any:
    import torch

    return torch.from_dlpack(array)


def _gather_step(
    x: Any, y: Any, scale: Any, weight: Any, slot: Any, parts: list[tuple[int, int]]
) -> Callable[..., None]:
    import torch

    rows = torch.nonzero(slot >= 0).flatten()
    own = slot[rows]

    def step(a: Any, b: Any) -> None:
        for part, (first, stop) in enumerate(parts):
            h = torch.einsum("ti,tri->tr", x[rows], a[own, part])
            h = h * (scale[own, part] * weight[rows])[:, None].to(h.dtype)
            y[rows, first:stop] += torch.einsum("tr,tro->to", h, b[own, :, first:stop])

    return step


def _groups_step(
    x: Any, y: Any, scale: Any, weight: Any, slot: Any,
    parts: list[tuple[int, int]], rank: list[list[int]],
) -> Callable[..., None]:  # fmt: skip
    import torch

    groups = [
        (s, torch.nonzero(slot == s).flatten())
        for s in torch.unique(slot[slot >= 0]).tolist()
    ]

    def step(a: Any, b: Any) -> None:
        for s, rows in groups:
            own_x = x[rows]
            for part, (first, stop) in enumerate(parts):
                r = rank[s][part]
                h = own_x @ a[s, part, :r].T * scale[s, part]
                h = h * weight[rows, None]
                y[rows, first:stop] += h.to(b.dtype) @ b[s, :r, first:stop]

    return step
