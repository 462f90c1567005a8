"""The load report: each tensor of an adapter's file and what became of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

ELSEWHERE = "not read: it is of an expert that another process holds"
"""Reason of the tensors outside an adapter's `local_experts`."""


@dataclass(frozen=True)
class ModuleReport:
    """One adapted module.

    Attributes:
      module: module path.
      kind: what is done to it, e.g. "lora".
      tensors: names of the file's tensors that went into it.
      rank: rank of the update, 0 where there is none.
      scale: factor on the update, 1.0 where there is none.
      scale_rule: how the scale was found, e.g. "alpha 16 / rank 8".
      dtype: dtype of the file's values.
      nbytes: bytes of its arrays.
    """

    module: str
    kind: str
    tensors: tuple[str, ...]
    rank: int
    scale: float
    scale_rule: str
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Ignored:
    """A tensor of the file that changes nothing, and why that is right."""

    tensor: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What was read; `matched + len(ignored) == total` always holds.

    Attributes:
      modules: one row for each adapted module, by path.
      ignored: the tensors left aside, each with its reason.
      total: number of tensors in the file.
      notes: facts worth knowing that are no faults, e.g. a pattern without a match.
    """

    modules: tuple[ModuleReport, ...]
    ignored: tuple[Ignored, ...]
    total: int
    notes: tuple[str, ...] = ()

    @property
    def matched(self) -> int:
        """Number of tensors that went into a module."""
        return sum(len(row.tensors) for row in self.modules)

    def to_dict(self) -> Mapping[str, object]:
        """Returns the report as plain values, for JSON."""
        return asdict(self) | {"matched": self.matched}

    def __str__(self) -> str:
        lines = [
            f"{self.matched} of {self.total} tensors in {len(self.modules)} modules"
        ]
        lines += [
            f"  {row.module}: {row.kind}, rank {row.rank}, "
            f"scale {row.scale:g} ({row.scale_rule}), {row.dtype}, {row.nbytes} bytes"
            for row in self.modules
        ]
        lines += [f"  ignored {item.tensor}: {item.reason}" for item in self.ignored]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])
