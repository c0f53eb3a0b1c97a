"""Tables of benchmarks as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from export.pages.tables import Table

MET = {True: "yes", False: "**no**", None: "-"}
"""Whether a figure meets its requirement; None: not measured."""


def as_markdown(table: Table) -> str:
    """The table in Markdown, with a heading if it has a title."""
    aligned = [":---" if index < table.words else "---:" for index in range(len(table.columns))]
    lines = [f"| {' | '.join(cells)} |" for cells in (table.columns, aligned, *table.rows)]
    title = f"## {table.title}" if table.title else ""
    return "\n\n".join(filter(None, [title, table.note, "\n".join(lines)]))
