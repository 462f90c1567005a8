"""What the commands print on: results on stdout, everything else on stderr.

`rich` is imported when something is printed, so that the library never needs it.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NARROW = 100
"""Columns of a table when the output is no terminal."""


def output() -> "Console":
    """Returns the console for results."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else NARROW, highlight=False)


def messages() -> "Console":
    """Returns the console for progress and errors."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True, highlight=False)


def print_error(text: str) -> None:
    """Prints one error message on stderr."""
    console = messages()
    console.print("[bold red]error:[/]", end=" ")
    console.print(text, markup=False)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> "Table":
    """Returns a table of plain text cells."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left", show_lines=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    return made


@contextmanager
def progress(text: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows what is being done and, when it is done, how long it took.

    Gives a function that says more about it, one line at a time.
    """
    if quiet:
        yield lambda _: None
        return
    console = messages()
    start = time.perf_counter()
    with console.status(f"{text} ..."):
        yield lambda line: console.print(f"  {line}", markup=False)
    console.print(f"{text}: {time.perf_counter() - start:.1f} s", markup=False)
