"""What users of PyTorch have, as timed functions for the benchmark; needs torch.

torch_gather   index the slot arrays by row, two einsums (vLLM's CPU path)
torch_groups   a Python loop over the slots that have rows
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from lora_kernels.lora_delta.specs import Arrays, Spec

FORMS = ("torch_gather", "torch_groups")
"""Names of the forms, as the benchmark prints them."""


def prepare(form: str, spec: Spec, pool: list[Arrays]) -> Callable[[], None]:
    """Returns a function that computes the whole pool once, in place into y.

    Raises:
      ImportError: if torch is not installed.
    """
    import torch

    def tensor(array: np.ndarray) -> Any:
        wide = torch.from_numpy(np.array(array, np.float32, copy=True))
        is_float = array.dtype.kind not in "iu"
        return wide.to(getattr(torch, spec.dtype) if is_float else torch.int64)

    sets = [[tensor(field) for field in arrays] for arrays in pool]
    stops = np.cumsum(spec.part_widths).tolist()
    parts = list(zip([0, *stops[:-1]], stops, strict=True))
    forms: dict[str, Callable[..., None]] = dict(
        zip(FORMS, (_gather, _groups), strict=True)
    )
    step = forms[form]

    @torch.inference_mode()
    def run() -> None:
        for tensors in sets:
            step(*tensors, parts)

    return run


def _gather(
    x: Any, y: Any, a: Any, b: Any, scale: Any, rank: Any, slot: Any, weight: Any,
    parts: list[tuple[int, int]],
) -> None:  # fmt: skip
    import torch

    rows = torch.nonzero(slot >= 0).flatten()
    own = slot[rows]
    for part, (first, stop) in enumerate(parts):
        h = torch.einsum("ti,tri->tr", x[rows], a[own, part])
        h = h * (scale[own, part] * weight[rows])[:, None].to(h.dtype)
        delta = torch.einsum("tr,tro->to", h, b[own, :, first:stop])
        y[rows, first:stop] += delta


def _groups(
    x: Any, y: Any, a: Any, b: Any, scale: Any, rank: Any, slot: Any, weight: Any,
    parts: list[tuple[int, int]],
) -> None:  # fmt: skip
    import torch

    for s in torch.unique(slot[slot >= 0]).tolist():
        rows = torch.nonzero(slot == s).flatten()
        own_x = x[rows]
        for part, (first, stop) in enumerate(parts):
            r = int(rank[s, part])
            h = own_x @ a[s, part, :r].T * scale[s, part]
            h = h * weight[rows, None].to(h.dtype)
            y[rows, first:stop] += h.to(b.dtype) @ b[s, :r, first:stop]
