"""Line charts, and one bar cut into parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from export.charts.plot import Plot, label, line, rect, svg_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from export.charts.plot import Axis

_HEAD = 48
_KEYS_AT, _KEY_ROW = -20.0, 18.0
_LETTER = 6.5
_PANEL_WIDTH, _PANEL_HEIGHT, _PANEL_GAP, _PANEL_SCALE = 480, 190, 14, 1.5
_BAR_WIDTH, _BAR_HEIGHT = 760, 26
_PHONE_WIDTH, _PHONE_HEIGHT = 360, 240


@dataclass(slots=True, frozen=True)
class Series:
    """A line.

    Attributes:
        name: For the legend.
        colour: A class of the page's style sheet.
        points: Pairs (x, y); a y that is no number interrupts the line.
        dots: Single points beside the line.
    """

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dots: Sequence[tuple[float, float]] = ()


def line_chart(
    description: str, across: Axis, up: Axis, series: Sequence[Series], limits: Sequence[tuple[float, str]] = ()
) -> str:
    """A chart with its legend, for a page with the style sheet.

    Args:
        description: For those who do not see it.
        across: The axis below.
        up: The axis beside.
        series: Drawn one over the other.
        limits: Values of `up` that are marked with a line, and their words for the legend.
    """
    keys = [f'<span><span class="key {entry.colour}"></span>{escape(entry.name)}</span>' for entry in series]
    keys += [f'<span><span class="key limit"></span>{escape(word)}</span>' for _, word in _shown(up, limits)]
    legend = f'<div class="legend">{"".join(keys)}</div>' if len(keys) > 1 else ""
    # Letters that shrank with the chart could not be read on a telephone: the page shows one of the two.
    plots = {"wide": Plot(across, up), "narrow": Plot(across, up, width=_PHONE_WIDTH, height=_PHONE_HEIGHT, right=16)}
    return legend + "".join(
        plot.svg(description, _content(plot, series, limits, ()), kind) for kind, plot in plots.items()
    )


def chart_file(
    title: str,
    across: Axis,
    up: Axis,
    series: Sequence[Series],
    limits: Sequence[tuple[float, str]] = (),
    moments: Sequence[float] = (),
) -> str:
    """The same as a file of its own, with its title above.

    `moments` are values of `across` that are marked with a line.
    """
    plot = Plot(across, up)
    drawn = plot.drawn(_content(plot, series, limits, moments))
    keys = [*series, *(Series(word, "limit", ()) for _, word in _shown(up, limits))]
    parts = [label(plot.left, -32, title, kind="title"), *_keys(keys, plot.left), drawn]
    return svg_file(title, plot.width, plot.height + _HEAD, parts, -_HEAD)


@dataclass(slots=True, frozen=True)
class Panel:
    """One of several figures over the same axis.

    Attributes:
        up: Its own axis.
        series: Lines of the same names and colours in every panel.
        beside: Lines of this panel alone, without a key.
    """

    up: Axis
    series: Sequence[Series]
    beside: Sequence[Series] = ()


def panels_file(title: str, across: Axis, panels: Sequence[Panel]) -> str:
    """Panels below one another as a file of its own, whose letters are still read on a telephone."""
    rows = _rows(panels[0].series)
    head = _HEAD + _KEY_ROW * (len(rows) - 1)
    parts = [label(0, 16 - head, title, kind="title")]
    for number, row in enumerate(reversed(rows)):
        parts += _keys(row, 0, _KEYS_AT - _KEY_ROW * number)
    for number, panel in enumerate(panels):
        plot = Plot(across, panel.up, width=_PANEL_WIDTH, height=_PANEL_HEIGHT, left=40, right=12, top=24)
        content = _content(plot, [*panel.beside, *panel.series], (), ())
        parts.append(f'<g transform="translate(0 {number * (_PANEL_HEIGHT + _PANEL_GAP)})">{plot.drawn(content)}</g>')
    height = len(panels) * (_PANEL_HEIGHT + _PANEL_GAP) + head
    return svg_file(title, _PANEL_WIDTH, height, parts, -head, _PANEL_SCALE)


def stacked_bar(description: str, parts: Sequence[tuple[str, str, float]]) -> str:
    """One bar cut into parts: name, colour and size of each."""
    whole = sum(size for *_, size in parts) or 1.0
    drawn, at = [], 0.0
    for name, colour, size in parts:
        width = size / whole * _BAR_WIDTH
        drawn.append(rect(colour, at, 0, width, _BAR_HEIGHT, f"{name}: {size:.3f} ms"))
        at += width
    box = f'viewBox="0 0 {_BAR_WIDTH} {_BAR_HEIGHT}"'
    return f'<svg class="bar" role="img" aria-label="{escape(description)}" {box}>{"".join(drawn)}</svg>'


def _keys(series: Sequence[Series], left: float, at: float = _KEYS_AT) -> list[str]:
    keys = []
    for entry in series:
        is_limit = entry.colour == "limit"
        keys.append(
            line("limit", left, at + 6, left + 11, at + 6) if is_limit else rect(entry.colour, left, at, 11, 11)
        )
        keys.append(label(left + 16, at + 10, entry.name))
        left += _key_width(entry)
    return keys


def _key_width(entry: Series) -> float:
    return 36 + _LETTER * len(entry.name)


def _rows(series: Sequence[Series]) -> list[list[Series]]:
    """The series in rows whose keys fit beside one another."""
    rows: list[list[Series]] = [[]]
    for entry in series:
        if rows[-1] and sum(map(_key_width, [*rows[-1], entry])) > _PANEL_WIDTH:
            rows.append([])
        rows[-1].append(entry)
    return rows


def _content(
    plot: Plot, series: Sequence[Series], limits: Sequence[tuple[float, str]], moments: Sequence[float]
) -> str:
    drawn = [line("moment", plot.x(at), plot.top, plot.x(at), plot.floor) for at in moments]
    drawn += [line("limit", plot.left, plot.y(at), plot.end, plot.y(at)) for at, _ in _shown(plot.up, limits)]
    for entry in series:
        drawn.append(f'<path class="series {entry.colour}" d="{_path(plot, entry.points)}"/>')
        drawn += [
            f'<circle class="{entry.colour}" r="3.5" cx="{plot.x(a):.1f}" cy="{plot.y(b):.1f}"/>'
            for a, b in entry.dots
            if math.isfinite(b)
        ]
    return "".join(drawn)


def _shown(up: Axis, limits: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Those that lie within an axis."""
    return [(value, word) for value, word in limits if up.low <= value <= up.high]


def _path(plot: Plot, points: Sequence[tuple[float, float]]) -> str:
    """Lines between the points, interrupted where one is no number."""
    words, is_open = [], False
    for a, b in points:
        if math.isfinite(b):
            words.append(f"{'L' if is_open else 'M'}{plot.x(a):.1f} {plot.y(b):.1f}")
        is_open = math.isfinite(b)
    return "".join(words)
