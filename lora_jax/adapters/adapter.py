"""What an adapter is in memory: module paths, each with the change made to it.

Knows nothing of files, of models, or of JAX. The kinds of change are in `parts`.
"""

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import ml_dtypes
import numpy as np

from lora_jax.adapters.copies import BaseCopy
from lora_jax.adapters.parts import AdapterPart, nested
from lora_jax.adapters.report import ELSEWHERE, Report
from lora_jax.errors import AdapterError

WEIGHT_DTYPES = tuple(
    np.dtype(dtype)
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
)
"""Dtypes that an adapter's weights may have; integers and 8-bit floats are refused."""

MAX_ID = 2**31 - 1
"""Ids travel as int32."""

ACTIVATED = "alora"
"""The kind of an adapter that acts only from its invocation tokens on."""


class _Ids:
    """Hands out ids 1, 2, 3, ...; an id that a caller chose is not handed out later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counter = itertools.count(1)
        self._taken: set[int] = set()

    def take(self, wanted: int | None) -> int:
        with self._lock:
            if wanted is None:
                wanted = next(i for i in self._counter if i not in self._taken)
            self._taken.add(wanted)
            return wanted


_IDS = _Ids()


def take_id(adapter_id: int | None) -> int:
    """Returns `adapter_id`, or the process's next unused id for None.

    Raises:
      AdapterError: if the id is not a whole number in 1..2**31-1 (0 means the base).
    """
    if adapter_id is None:
        return _IDS.take(None)
    if type(adapter_id) is not int or not 1 <= adapter_id <= MAX_ID:
        raise AdapterError(
            f"adapter id {adapter_id!r} is not a whole number in 1..{MAX_ID} "
            "(0 means the base model); choose another, or None for the next free one."
        )
    return _IDS.take(adapter_id)


@dataclass(frozen=True, eq=False, repr=False)
class Adapter:
    """One adapter, complete and checked, on the host.

    Attributes:
      name: what people call it; the folder's name unless told otherwise.
      id: positive, unique in the process unless the caller chose it.
      parts: module path as in the Hugging Face model, without `base_model.model.`,
        e.g. `model.layers.0.self_attn.q_proj` -> what is done to that module.
      content_hash: SHA-256 of the values and scales; equal for equal adapters whatever
        their name, id, file, or order of tensors.
      report: every tensor of the file, and what became of it.
      base_model: the base model's name in the config, "" where it has none.
      config: the adapter's config as read.
      invocation_tokens: token ids from whose last occurrence on the adapter acts; empty
        for one that always acts.
      base_copies: module path -> sample of the base weight that the file carries; they
        must equal the served base's (`BaseCopy.difference`).
      local_experts: experts whose own tensors were read; None: all.
    """

    name: str
    id: int
    parts: Mapping[str, AdapterPart]
    content_hash: str
    report: Report
    base_model: str = ""
    config: Mapping[str, object] = field(default_factory=dict)
    invocation_tokens: tuple[int, ...] = ()
    base_copies: Mapping[str, BaseCopy] = field(default_factory=dict)
    local_experts: range | None = None

    def __post_init__(self) -> None:
        for name in ("parts", "config", "base_copies"):
            frozen = MappingProxyType(dict(getattr(self, name)))
            object.__setattr__(self, name, frozen)

    @property
    def rank(self) -> int:
        """Largest rank of any module, from the tensors; 0 without low-rank parts."""
        return max((part.rank for part in self.parts.values()), default=0)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of change it makes, "alora" among them if it waits for its tokens.

        A server must know them all to serve it.
        """
        kinds = {inner.kind for part in self.parts.values() for inner in nested(part)}
        return frozenset(kinds | ({ACTIVATED} if self.invocation_tokens else set()))

    @property
    def is_partial(self) -> bool:
        """Whether experts of the file were left to other processes."""
        return any(item.reason == ELSEWHERE for item in self.report.ignored)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that its arrays hold."""
        return sum(row.nbytes for row in self.report.modules)

    def __repr__(self) -> str:
        return (
            f"Adapter({self.name!r}, id={self.id}, rank={self.rank}, "
            f"modules={len(self.parts)}, hash={self.content_hash[:12]})"
        )
