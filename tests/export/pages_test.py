from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from bertserve.export.pages import html
from bertserve.export.pages.plots import Axis, Bars, Histogram, Lines, Scatter, Series, Shares, as_file, in_page
from bertserve.export.pages.tables import Table, as_text, show
from tests.support.models import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from bertserve.export.pages.plots import Plot

TABLE = Table("Title", "Note.", ("name", "figure"), [("a\x1b[2J", "1.5"), ("longer", "held")], words=1)
LINES = Lines(
    Axis("requests a second"),
    Axis("ms", is_log=True),
    [Series("p50", "blue", [(1, 2.0), (2, math.nan), (3, 4.0)], [(2, math.inf), (3, 5.0)]), Series("p99", "grey", [])],
    limits=[(10.0, "SLO 10 ms")],
)


def words_of(plot: Plot) -> list[str]:
    """The words of a plot that is a file, which must be XML."""
    drawn = ET.fromstring(as_file("A & B", plot))  # noqa: S314  our own file
    return [entry.text or "" for entry in drawn.iter("{http://www.w3.org/2000/svg}text")]


def test_a_page_s_text_is_escaped_once() -> None:
    """Whatever it holds; what a macro has made is markup already, and what cannot be seen is shown."""
    page = html.render("a<b", [html.Section("c<d", [{"one & two": "\u202e<i>"}])])
    assert "<title>a&lt;b</title>" in page
    assert "<h2>c&lt;d</h2>" in page
    assert "<dt>one &amp; two</dt>" in page
    assert ">\N{REPLACEMENT CHARACTER}&lt;i&gt;</dd>" in page


def test_a_plot_says_its_title_axes_and_names() -> None:
    """As text, which can be read, searched and copied; a limit stands in the key, an interrupted line is drawn."""
    words = words_of(LINES)
    assert {"A & B", "requests a second", "ms", "p50", "p99", "SLO 10 ms", "2", "10"} <= set(words)


def test_a_plot_follows_the_reader_s_scheme() -> None:
    """Every colour is a variable: of the page's style sheet, or of the file's own."""
    for drawn in (in_page("Latency", LINES), as_file("Latency", LINES).partition("</style>")[2]):
        assert "var(--blue)" in drawn
        assert not re.search(r"#[0-9a-f]{6}|\bblack\b", drawn)
    assert "prefers-color-scheme: dark" in as_file("Latency", LINES)


def test_a_plot_of_the_same_is_the_same_to_the_byte() -> None:
    """Without dates, and without names of chance."""
    assert as_file("Latency", LINES) == as_file("Latency", LINES)
    assert in_page("Latency", LINES) == in_page("Latency", LINES)


def test_plots_write_nothing_into_a_home(tmp_path: Path) -> None:
    """Not even what would be faster the next time; a home that is not there is no matter."""
    program = (
        "import os; from bertserve.export.pages.plots import Shares, as_file; "
        "as_file('t', Shares('ms', [('a', 'blue', 1)]));"
        "assert 'MPLCONFIGDIR' not in os.environ"
    )
    env = {name: value for name, value in os.environ.items() if name != "MPLCONFIGDIR"}
    for home in (tmp_path, tmp_path / "none"):
        places = {"HOME": str(home), "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": ""}
        command = [sys.executable, "-W", "error", "-c", program]
        done = subprocess.run(command, cwd=ROOT, env=env | places, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("values", [[], [0.0], [1.0, 1.0], [1e-300, 1e300], [np.nan]])
def test_a_histogram_of_anything_is_a_picture(values: list[float]) -> None:
    """No, equal and extreme distances are drawn without a fault, each bar with the number of its texts."""
    words = words_of(Histogram(np.array(values), "distance", 1e-4, "most"))
    assert {"distance", "texts", "most"} <= set(words)
    counts = np.unique([value for value in values if not np.isnan(value)], return_counts=True)[1]
    assert [words.count(str(count)) >= 1 for count in counts] == [True] * len(counts)


@pytest.mark.parametrize(
    "points", [np.zeros((0, 2)), np.ones((5, 2)), np.array([[1e-30, 2e-30]]), np.array([[1e9, 0], [np.nan, 1]])]
)
def test_a_scatter_of_anything_is_a_picture(points: np.ndarray) -> None:
    """No, equal, tiny and huge numbers are drawn without a fault."""
    assert {"across", "up"} <= set(words_of(Scatter(points, "across", "up")))


def test_bars_and_shares_say_their_figures() -> None:
    """Every subject has a bar and its median in every panel; every share stands in the key."""
    bars = Bars(
        "p50, ms", 2, [("ours", "blue"), ("theirs", "grey")], {"8": [(1, 0.5, 2), (3, 3, 4.5)], "32": [(5, 5, 5)] * 2}
    )
    words = words_of(bars)
    assert {"p50, ms", "8", "32", "ours", "theirs", "1.00", "3.00"} <= set(words)
    assert words.count("5.00") == 2
    assert {"queue", "compute"} <= set(words_of(Shares("ms", [("queue", "grey", 1.0), ("compute", "blue", 2.0)])))


def test_a_table_lines_up() -> None:
    """Words stand to the left, figures to the right, and nothing in it moves a terminal's cursor."""
    assert as_text("first", TABLE).splitlines() == [
        "first",
        "Title",
        "Note.",
        "",
        "name      figure",
        "--------  ------",
        r"a\x1b[2J     1.5",
        "longer      held",
    ]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """It does."""
        return True


def test_a_terminal_shows_verdicts_in_colour(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Elsewhere, and without rich, the same is plain."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    show(TABLE)
    assert capsys.readouterr().out == f"{as_text(TABLE)}\n"
    monkeypatch.setattr(sys, "stdout", coloured := Terminal())
    show("first", TABLE)
    assert re.search(r"\x1b\[32m *held\x1b\[0m", coloured.getvalue())
    assert "\x1b[2J" not in coloured.getvalue()
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys, "stdout", plain := Terminal())
    show("first", TABLE)
    assert plain.getvalue() == f"{as_text('first', TABLE)}\n"
