"""Tables and plots of the pages: one declaration for each column, one call for each plot."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING, Any, TypeVar

from export.pages.plots import Axis, Lines, Series, as_file
from loadtest.errors import BenchError
from loadtest.report.tables import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Points = Sequence[tuple[float, float]]

_Row = TypeVar("_Row")
_BLOCK = re.compile(r"(?P<begin><!-- made: (?P<name>[a-z ]+) -->\n).*?(?P<end><!-- made until here -->)", re.DOTALL)


def filled(text: str, made: Mapping[str, str]) -> str:
    """A page that is written by hand, with what is made today between its marks.

    Raises:
        BenchError: What is made has no place there.
    """
    places = [match["name"] for match in _BLOCK.finditer(text)]
    if sorted(places) != sorted(made):
        raise BenchError(f"the page must have a place for each of {', '.join(made)}, and has {', '.join(places)}")
    return _BLOCK.sub(lambda match: f"{match['begin']}\n{made[match['name']]}\n\n{match['end']}", text)


def table(
    title: str, note: str, rows: Iterable[_Row], *columns: tuple[str, Callable[[_Row], object]], words: int = 0
) -> Table:
    """A table whose columns are pairs of a head and what makes a cell of a row; `words` of them stand to the left."""
    cells = [[str(cell(row)) for _, cell in columns] for row in rows]
    return Table(title, note, tuple(head for head, _ in columns), cells, words)


def figure(name: str, decimals: int = 1) -> Callable[[Mapping[str, Any]], str]:
    """A cell: that figure of a row, `-` where it has none."""

    def cell(row: Mapping[str, Any]) -> str:
        return "-" if row.get(name) is None else f"{row[name]:.{decimals}f}"

    return cell


def median(name: str, decimals: int = 1) -> Callable[[Iterable[Mapping[str, Any]]], str]:
    """A cell: the median of that figure over the runs of a row."""
    return lambda runs: f"{statistics.median(run[name] for run in runs):.{decimals}f}"


def chart(
    title: str,
    across: str,
    up: str,
    lines: Mapping[str, tuple[str, Points] | tuple[str, Points, Points]],
    *,
    log_across: bool = False,
    log_up: bool = False,
    reach: float | None = None,
    whole: bool = False,
    limits: Sequence[tuple[float, str]] = (),
    moments: Sequence[float] = (),
) -> str:
    """A plot of lines by name: colour, points and dots of each.

    Args:
        title: Above it.
        across: What the axis below says.
        up: What the axis beside says.
        lines: Drawn one over the other.
        log_across: Whether the axis below is logarithmic.
        log_up: Likewise of the axis beside.
        reach: The end of the axis below, where that is not the last point.
        whole: Whether the axis below begins and ends with the points and marks whole numbers.
        limits: Values of `up` that are marked, with their words.
        moments: Values of `across` that are marked.
    """
    series = [Series(name, *line) for name, line in lines.items()]
    below = Axis(across, log_across, high=reach)
    if whole:
        xs = [x for line in series for x, _ in (*line.points, *line.dots)]
        marks = range(round(min(xs)), round(max(xs)) + 1)
        below = Axis(across, low=min(xs), high=max(xs), ticks={float(mark): f"{mark}" for mark in marks})
    return as_file(title, Lines(below, Axis(up, log_up), series, limits, moments))
