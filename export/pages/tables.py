"""Tables for people, on a terminal; `page.html` shows them in a page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

TONES = {
    **dict.fromkeys(("held", "kept", "proven", "proven, on a CPU"), "good"),
    **dict.fromkeys(("within noise", "unproven", "limits waived", "broken, waived", "Caution"), "caution"),
    **dict.fromkeys(("missed", "broken"), "bad"),
}
"""Words with a color of their own. Each tone is a class of `style.css`."""

_COLOURS = {"good": "green", "caution": "yellow", "bad": "bold red", "": ""}


@dataclass(slots=True, frozen=True)
class Table:
    """A table.

    Attributes:
        title: What it shows; may be empty.
        note: One or two sentences on how to read it; may be empty.
        columns: Headings.
        rows: Rows with one cell per column.
        words: Number of leading columns that hold words and are left-aligned. The others hold figures.
    """

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 0


def untitled(columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 0) -> Table:
    """A table whose title is shown elsewhere."""
    return Table("", "", columns, rows, words)


def printable(words: str) -> str:
    """Escapes characters that would move a terminal's cursor or change its colors."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def as_text(*parts: str | Table) -> str:
    """Formats lines and tables for a fixed-width font."""
    return "\n".join(part if isinstance(part, str) else _align(part) for part in parts)


def _align(table: Table) -> str:
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
    """Prints lines and tables: with rich on a terminal, plain elsewhere or if rich is not installed."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        print(as_text(*parts))  # noqa: T201  output of commands
        return
    import rich.box  # noqa: PLC0415  installed only where reports are made
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
        # A table may be wider than the terminal and is not cut: people copy digests and commands from it.
        width = console.measure(drawn, options=console.options.update(max_width=1 << 16)).maximum
        console.print(drawn, width=max(width, 1), crop=False)
