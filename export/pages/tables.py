"""A table that a person reads, on a terminal; `parts.html` shows it in a page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

TONES = {
    **dict.fromkeys(("held", "kept", "proven", "proven, on a CPU"), "good"),
    **dict.fromkeys(("within noise", "unproven", "limits waived", "broken, waived"), "caution"),
    **dict.fromkeys(("missed", "broken"), "bad"),
}
"""Cells with a colour of their own: each is a class of `style.css`."""

_COLOURS = {"good": "green", "caution": "yellow", "bad": "bold red", "": ""}


@dataclass(slots=True, frozen=True)
class Table:
    """A table.

    Attributes:
        title: What it shows; may be empty.
        note: A sentence or two on how to read it; may be empty.
        columns: Their heads.
        rows: As many cells each as there are columns.
        words: The first so many columns hold words and stand to the left; the rest are figures.
    """

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 0


def untitled(columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 0) -> Table:
    """A table whose title stands elsewhere."""
    return Table("", "", columns, rows, words)


def printable(words: str) -> str:
    """Words for a terminal: what would move its cursor or change its colours is written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def as_text(*parts: str | Table) -> str:
    """Lines and tables in a fixed-width font."""
    return "\n".join(part if isinstance(part, str) else _aligned(part) for part in parts)


def _aligned(table: Table) -> str:
    rows = [[printable(cell) for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = [
        "  ".join(
            cell.ljust(width) if index < table.words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    head = [words for words in (table.title, table.note) if words]
    return "\n".join([*head, "", *lines] if head else lines)


def show(*parts: str | Table) -> None:
    """Prints lines and tables: by rich on a terminal, plain elsewhere and where rich is not installed."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        print(as_text(*parts))  # noqa: T201  what commands show
        return
    import rich.box  # noqa: PLC0415  installed with what makes reports alone
    import rich.console  # noqa: PLC0415
    import rich.table  # noqa: PLC0415
    import rich.text  # noqa: PLC0415

    console = rich.console.Console(highlight=False)
    for part in parts:
        if isinstance(part, str):
            console.print(rich.text.Text(part), soft_wrap=True)
            continue
        drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD, header_style="bold")
        for index, column in enumerate(part.columns):
            drawn.add_column(column, justify="left" if index < part.words else "right", no_wrap=True)
        for row in part.rows:
            drawn.add_row(*(rich.text.Text(printable(cell), _COLOURS[TONES.get(cell, "")]) for cell in row))
        for words in filter(None, (part.title, part.note)):
            console.print(rich.text.Text(words), soft_wrap=True)
        # Wider than the terminal rather than cut: digests and commands are copied from here.
        width = console.measure(drawn, options=console.options.update(max_width=1 << 16)).maximum
        console.print(drawn, width=max(width, 1), crop=False)
