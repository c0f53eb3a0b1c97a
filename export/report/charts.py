"""The two charts of the report, as SVG that takes its colours from the page."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from export.report.markup import Markup, element, join

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_WIDTH, _HEIGHT = 360, 216
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 18, 22, 36
_SMALLEST = 1e-16
"""Distances below this are rounding of float64; they are drawn here."""
_BINS = 24
_MOST_TICKS = 6


def distances(values: NDArray[np.float64], axis: str, limit: float | None, limit_name: str = "limit") -> Markup:
    """A histogram of the texts' distances from PyTorch, over a logarithmic axis.

    Args:
        values: A distance for each text; what is not a number is left out.
        axis: What they are.
        limit: What none may exceed, drawn as a line; None draws none.
        limit_name: What stands beside the line.
    """
    exponents = np.log10(np.maximum(values[np.isfinite(values)], _SMALLEST))
    marked = [] if limit is None or limit <= 0 else [math.log10(limit)]
    low, high = _decades([*exponents.tolist(), *marked])
    counts, edges = np.histogram(exponents, bins=_BINS, range=(low, high))
    most = int(counts.max(initial=1))
    plot = _Plot(low, high, 0, most)
    bars = [
        element(
            "rect",
            element("title", f"{count} texts between {10**start:.1e} and {10**end:.1e}"),
            x=_short(plot.x(start) + 0.75),
            y=_short(plot.y(count)),
            width=_short(plot.x(end) - plot.x(start) - 1.5),
            height=_short(plot.y(0) - plot.y(count)),
            rx=1,
            class_="bar",
        )
        for count, (start, end) in zip(counts.tolist(), pairwise(edges.tolist()), strict=True)
        if count
    ]
    step = max(1, math.ceil((high - low) / _MOST_TICKS))
    ticks = [(exponent, f"1e{exponent}") for exponent in range(low, high + 1, step)]
    lines = [_limit_line(plot, place, limit_name) for place in marked]
    return plot.draw(f"Histogram: {axis}", axis, ticks, [(0, "0"), (most, str(most))], "texts", join(*bars, *lines))


def scatter(points: NDArray[np.float64]) -> Markup:
    """PyTorch's numbers and an artifact's beside them, with the diagonal on which they would be the same.

    Args:
        points: float64 [n, 2]; a point that is not finite is left out.
    """
    shown = points[np.isfinite(points).all(axis=1)]
    low, high = (float(shown.min()), float(shown.max())) if len(shown) else (0.0, 1.0)
    margin = (high - low) * 0.04 or 1.0
    low, high = low - margin, high + margin
    plot = _Plot(low, high, low, high)
    places = "".join(f"M{plot.x(x):.1f} {plot.y(y):.1f}h0" for x, y in shown.tolist())
    diagonal = element("line", x1=plot.x(low), y1=plot.y(low), x2=plot.x(high), y2=plot.y(high), class_="diagonal")
    ticks = [(value, f"{value:g}") for value in _round_numbers(low, high)]
    drawn = join(diagonal, element("path", d=places, class_="point"))
    return plot.draw(
        f"Scatter plot of {len(shown)} numbers", "PyTorch's number", ticks, ticks, "artifact's number", drawn
    )


class _Plot:
    """A rectangle of data and the place on the page that it is drawn at."""

    def __init__(self, left: float, right: float, bottom: float, top: float) -> None:
        self._x, self._width = left, right - left
        self._y, self._height = bottom, top - bottom

    def x(self, value: float) -> float:
        return _LEFT + (value - self._x) / self._width * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self._y) / self._height * (_HEIGHT - _TOP - _BOTTOM)

    def draw(
        self,
        description: str,
        below: str,
        across: Sequence[tuple[float, str]],
        up: Sequence[tuple[float, str]],
        beside: str,
        content: Markup,
    ) -> Markup:
        """The chart: its axes with their ticks and titles, and what was drawn on them."""
        floor, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        grid = [_line(_LEFT, self.y(value), right, self.y(value), "grid") for value, _ in up]
        names = [_label(_LEFT - 6, self.y(value) + 4, word, "end") for value, word in up]
        names += [_label(self.x(value), floor + 15, word, "middle") for value, word in across]
        names += [_label(right, _HEIGHT - 4, below, "end"), _label(0, 12, beside, "start")]
        return element(
            "svg",
            *grid,
            _line(_LEFT, floor, right, floor, "axis"),
            content,
            *names,
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            role="img",
            aria_label=description,
        )


def _decades(exponents: list[float]) -> tuple[int, int]:
    """The whole exponents around all; one decade at least."""
    low = math.floor(min(exponents, default=0))
    return low, max(low + 1, math.ceil(max(exponents, default=1)))


def _round_numbers(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 and a power of ten within a range, a handful."""
    rough = (high - low) / _MOST_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(number * step, 12) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _limit_line(plot: _Plot, at: float, name: str) -> Markup:
    place = plot.x(at)
    fits_right = place < _WIDTH / 2
    label = _label(place + (4 if fits_right else -4), _TOP - 4, name, "start" if fits_right else "end", "limit")
    return join(_line(place, _TOP - 12, place, _HEIGHT - _BOTTOM, "limit"), label)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return element("line", x1=_short(x1), y1=_short(y1), x2=_short(x2), y2=_short(y2), class_=kind)


def _label(x: float, y: float, words: str, anchor: str, kind: str | None = None) -> Markup:
    return element("text", words, x=_short(x), y=_short(y), text_anchor=anchor, class_=kind)


def _short(number: float) -> str:
    return f"{number:.1f}"
