"""Line charts as SVG that takes its colours from the page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH, _HEIGHT = 760, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 26, 22, 38
_MOST_TICKS = 8
_HEAD = 48
_LETTER = 6.5

_STYLE = """\
text{font:12px system-ui,sans-serif;fill:#59636e}.title{font-weight:600;font-size:13px;fill:#1f2328}
.ground{fill:#fff}.grid{stroke:#dde1e6}.axis{stroke:#59636e}.limit{stroke:#b3261e;stroke-dasharray:5 3}
.limit-name{fill:#b3261e}
.moment{stroke:#8a93a0;stroke-dasharray:2 3}.series{fill:none;stroke-width:1.75;stroke-linejoin:round}
.blue{stroke:#2766c8}.orange{stroke:#b05a00}.green{stroke:#17703a}.grey{stroke:#8a93a0}.violet{stroke:#7a4bb8}
rect.blue,circle.blue{fill:#2766c8}rect.orange,circle.orange{fill:#b05a00}rect.green,circle.green{fill:#17703a}
rect.grey,circle.grey{fill:#8a93a0}rect.violet,circle.violet{fill:#7a4bb8}
@media(prefers-color-scheme:dark){text{fill:#9198a1}.title{fill:#e6edf3}.ground{fill:#0d1117}.grid{stroke:#31373f}}"""


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


@dataclass(slots=True, frozen=True)
class Axis:
    """A direction of a chart.

    Attributes:
        title: What it shows, with its unit.
        low: Its first value.
        high: Its last.
        ticks: Values that are marked, and their words.
        is_log: Whether equal distances are equal factors.
    """

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False

    @classmethod
    def of(cls, title: str, values: Sequence[float], *, is_log: bool = False) -> Axis:
        """An axis with round ticks that has room for the values."""
        known = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)] or [1.0]
        if not is_log:
            high = max(known) * 1.05 or 1.0
            step = _round_step(high / _MOST_TICKS)
            ticks = [step * place for place in range(int(high / step) + 1)]
            return cls(title, 0.0, high, [(tick, f"{tick:g}") for tick in ticks])
        decades = range(math.floor(math.log10(min(known))), math.ceil(math.log10(max(known) * 1.01)) + 1)
        steps = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
        low = max(step for step in steps if step <= min(known) * (1 + 1e-9))
        high = min((step for step in steps if step >= max(known) and step > low), default=steps[-1])
        ticks = [step for step in steps if low <= step <= high]
        if len(ticks) > _MOST_TICKS:
            ticks = [tick for tick in ticks if f"{tick:e}".startswith("1")]
        return cls(title, low, high, [(tick, f"{tick:g}") for tick in ticks], is_log=True)

    def place(self, value: float) -> float:
        """Where a value lies: 0 at the axis's start, 1 at its end."""
        if self.is_log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def line_chart(
    description: str, across: Axis, up: Axis, series: Sequence[Series], limits: Sequence[tuple[float, str]] = ()
) -> str:
    """A chart with its legend, for a page with the style sheet.

    Args:
        description: For those who do not see it.
        across: The axis below.
        up: The axis beside.
        series: Drawn one over the other.
        limits: Values of `up` that are marked with a line and a word.
    """
    keys = [f'<span><span class="key {line.colour}"></span>{escape(line.name)}</span>' for line in series]
    legend = f'<div class="legend">{"".join(keys)}</div>' if len(keys) > 1 else ""
    head = f'<svg role="img" aria-label="{escape(description)}" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
    return f"{legend}{head}{_drawn(across, up, series, limits)}</svg>"


def chart_file(
    title: str,
    across: Axis,
    up: Axis,
    series: Sequence[Series],
    limits: Sequence[tuple[float, str]] = (),
    moments: Sequence[float] = (),
) -> str:
    """The same as a file of its own, which follows the reader's light or dark scheme; the title stands above.

    `moments` are values of `across` that are marked with a line.
    """
    height = _HEIGHT + _HEAD
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 {-_HEAD} {_WIDTH} {height}"'
    keys, at = [], float(_LEFT)
    for line in series:
        keys.append(f'<rect class="{line.colour}" x="{at:.0f}" y="-20" width="11" height="11" rx="2"/>')
        keys.append(_label(at + 16, -10, line.name, "start"))
        at += 36 + _LETTER * len(line.name)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" {size}>',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" x="0" y="{-_HEAD}" width="{_WIDTH}" height="{height}"/>',
        _label(_LEFT, -32, title, "start", "title"),
        *keys,
        _drawn(across, up, series, limits, moments),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _drawn(
    across: Axis,
    up: Axis,
    series: Sequence[Series],
    limits: Sequence[tuple[float, str]],
    moments: Sequence[float] = (),
) -> str:
    right, floor = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(value: float) -> float:
        return _LEFT + across.place(value) * (right - _LEFT)

    def y(value: float) -> float:
        return floor - up.place(value) * (floor - _TOP)

    drawn = [f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>' for v, _ in up.ticks]
    drawn += [_label(_LEFT - 7, y(value) + 4, word, "end") for value, word in up.ticks]
    drawn += [_label(x(value), floor + 16, word, "middle") for value, word in across.ticks]
    drawn += [_label(right, _HEIGHT - 4, across.title, "end"), _label(0, 12, up.title, "start")]
    drawn.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>')
    drawn += [f'<line class="moment" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{floor}"/>' for at in moments]
    for value, word in limits:
        if up.low <= value <= up.high:
            drawn.append(f'<line class="limit" x1="{_LEFT}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
            drawn.append(_label(right - 4, y(value) - 5, word, "end", "limit-name"))
    for line in series:
        known = [(x(a), y(b)) if math.isfinite(b) else None for a, b in line.points]
        drawn.append(f'<path class="series {line.colour}" d="{_path(known)}"/>')
        drawn += [
            f'<circle class="{line.colour}" r="3.5" cx="{x(a):.1f}" cy="{y(b):.1f}"/>'
            for a, b in line.dots
            if math.isfinite(b)
        ]
    return "".join(drawn)


def stacked_bar(description: str, parts: Sequence[tuple[str, str, float]]) -> str:
    """One bar cut into parts.

    Args:
        description: For those who do not see it.
        parts: Name, colour and size of each.
    """
    whole = sum(size for *_, size in parts) or 1.0
    drawn, at = [], 0.0
    for name, colour, size in parts:
        width = size / whole * _WIDTH
        title = f"<title>{escape(name)}: {size:.3f} ms</title>"
        drawn.append(f'<rect class="{colour}" x="{at:.1f}" y="0" width="{width:.1f}" height="26">{title}</rect>')
        at += width
    return f'<svg role="img" aria-label="{escape(description)}" viewBox="0 0 {_WIDTH} 26">{"".join(drawn)}</svg>'


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """Lines between the points, interrupted where there is none."""
    words, is_open = [], False
    for point in points:
        if point is None:
            is_open = False
            continue
        words.append(f"{'L' if is_open else 'M'}{point[0]:.1f} {point[1]:.1f}")
        is_open = True
    return "".join(words)


def _round_step(least: float) -> float:
    decade = 10.0 ** math.floor(math.log10(least))
    return next(decade * digit for digit in (1, 2, 5, 10) if decade * digit >= least)


def _label(x: float, y: float, words: str, anchor: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
