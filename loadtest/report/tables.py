"""A table that a person reads, on a terminal and in Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


MET = {True: "yes", False: "**no**", None: "-"}
"""Whether a figure is as asked; None where it was not measured."""


@dataclass(slots=True, frozen=True)
class Table:
    """A table.

    Attributes:
        title: What it shows.
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


def as_text(table: Table) -> str:
    """The table in a fixed-width font."""
    widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        placed = [
            cell.ljust(width) if index < table.words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(placed).rstrip()

    rule = "  ".join("-" * width for width in widths)
    head = [table.title, table.note] if table.note else [table.title]
    return "\n".join([*head, "", line(table.columns), rule, *map(line, table.rows)])


def as_markdown(table: Table) -> str:
    """The table in Markdown, under a heading where it has a title."""
    aligned = [":---" if index < table.words else "---:" for index in range(len(table.columns))]
    lines = [f"| {' | '.join(cells)} |" for cells in (table.columns, aligned, *table.rows)]
    title = f"## {table.title}" if table.title else ""
    return "\n\n".join(filter(None, [title, table.note, "\n".join(lines)]))
