from __future__ import annotations

from loadtest.report.tables import Table, as_markdown, as_text


def test_a_table_lines_up() -> None:
    """On a terminal words stand to the left, figures to the right, and every line has its columns."""
    table = Table("Title", "Note.", ("name", "figure"), [("a", "1.5"), ("longer", "10.25")], words=1)
    assert as_text(table).splitlines() == [
        "Title",
        "Note.",
        "",
        "name    figure",
        "------  ------",
        "a          1.5",
        "longer   10.25",
    ]
    assert as_markdown(table).splitlines() == [
        "## Title",
        "",
        "Note.",
        "",
        "| name | figure |",
        "| :--- | ---: |",
        "| a | 1.5 |",
        "| longer | 10.25 |",
    ]
