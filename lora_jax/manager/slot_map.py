"""Who sits in which slot, to look at: rows of plain values, as text and as HTML.

LRUCacheLoRAModelManager: 1 of 2 slots, 3 of 4 adapters, 17.2 KiB on the device
slot  adapter   id  rank  modules     bytes  pinned  held  used
0     sql        7     8       14   8.6 KiB  yes        2  0.3 s ago
1     -
"""

import html
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lora_jax.manager.memory import shown
from lora_jax.manager.tiers import Tiers

COLUMNS = (
    "slot",
    "adapter",
    "id",
    "rank",
    "modules",
    "bytes",
    "pinned",
    "held",
    "used",
)
NUMBERS = frozenset({"id", "rank", "modules", "bytes", "held"})
"""Columns that are aligned to the right."""

RETIRED = "(retired)"
"""Shown for a slot whose adapter has been removed while requests still run on it."""


@dataclass(frozen=True)
class SlotRow:
    """One slot.

    Attributes:
      slot: its number.
      adapter: the adapter's name, None if no id reaches the slot.
      id: the adapter's id, or None.
      rank: the adapter's largest rank, 0 without one.
      modules: how many modules it adapts.
      nbytes: bytes of its host copy at its own ranks.
      pinned: whether it is pinned in its slot.
      holds: claims of running requests on what the slot holds.
      idle: seconds since its last use; None without an adapter.
    """

    slot: int
    adapter: str | None = None
    id: int | None = None
    rank: int = 0
    modules: int = 0
    nbytes: int = 0
    pinned: bool = False
    holds: int = 0
    idle: float | None = None


def slot_rows(tiers: Tiers) -> list[SlotRow]:
    """Returns one row per slot."""
    return [
        _row(tiers, slot, id)
        if id is not None
        else SlotRow(slot, holds=len(tiers.table.retired.get(slot, ())))
        for slot, id in enumerate(tiers.table.index_to_id)
    ]


def to_text(headline: str, rows: Sequence[SlotRow]) -> str:
    """Returns the slot map as aligned lines."""
    lines = [COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            cell.rjust(width) if name in NUMBERS else cell.ljust(width)
            for name, cell, width in zip(COLUMNS, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([headline, *aligned])


def to_html(headline: str, rows: Sequence[SlotRow]) -> str:
    """Returns the slot map as an HTML table; names are escaped."""
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(map(_html_row, rows))
    return (
        f"<p>{html.escape(headline)}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _html_row(row: SlotRow) -> str:
    cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row))
    return f"<tr>{cells}</tr>"


def _row(tiers: Tiers, slot: int, id: int) -> SlotRow:
    prepared = tiers.host[id]
    return SlotRow(
        slot=slot,
        adapter=prepared.adapter.name,
        id=id,
        rank=prepared.adapter.rank,
        modules=len(prepared.packed.placed),
        nbytes=prepared.packed.nbytes,
        pinned=tiers.table.active.is_pinned(id),
        holds=len(tiers.table.holds.get(id, ())),
        idle=time.monotonic() - tiers.last_used[id],
    )


def _cells(row: SlotRow) -> tuple[str, ...]:
    if row.idle is None:
        name, held = (RETIRED, str(row.holds)) if row.holds else ("-", "")
        return (str(row.slot), name, "", "", "", "", "", held, "")
    return (
        str(row.slot),
        str(row.adapter),
        str(row.id),
        str(row.rank),
        str(row.modules),
        shown(row.nbytes),
        "yes" if row.pinned else "",
        str(row.holds) if row.holds else "",
        f"{row.idle:.1f} s ago",
    )
