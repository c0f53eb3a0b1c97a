"""What all charts share: axes with round ticks, the rectangle that data are drawn in, lines and labels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_TICKS = 8
_DIGIT = 7
"""Width of a digit in the words of an axis."""

FILE_STYLE = """\
text{font:12px system-ui,sans-serif;fill:#59636e}.title{font-weight:600;font-size:13px;fill:#1f2328}
.name{fill:#1f2328}.ground{fill:#fff}.grid{stroke:#dde1e6}.axis{stroke:#59636e}.spread{stroke:#1f2328}
line.limit{stroke:#b3261e;stroke-dasharray:5 3}
.moment{stroke:#8a93a0;stroke-dasharray:2 3}.series{fill:none;stroke-width:1.75;stroke-linejoin:round}
.blue{stroke:#2766c8}.orange{stroke:#b05a00}.green{stroke:#17703a}.grey{stroke:#8a93a0}.violet{stroke:#7a4bb8}
rect.blue,circle.blue{fill:#2766c8}rect.orange,circle.orange{fill:#b05a00}rect.green,circle.green{fill:#17703a}
rect.grey,circle.grey{fill:#8a93a0}rect.violet,circle.violet{fill:#7a4bb8}
@media(prefers-color-scheme:dark){text{fill:#9198a1}.title,.name{fill:#e6edf3}.ground{fill:#0d1117}
.grid{stroke:#31373f}.spread{stroke:#e6edf3}
.blue{stroke:#76aef8}.orange{stroke:#eda24c}.green{stroke:#5bc98a}.violet{stroke:#bb97ee}
rect.blue,circle.blue{fill:#76aef8}rect.orange,circle.orange{fill:#eda24c}rect.green,circle.green{fill:#5bc98a}
rect.violet,circle.violet{fill:#bb97ee}}"""
"""The style sheet of a chart that is a file of its own."""


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
    def of(cls, title: str, values: Sequence[float], *, is_log: bool = False) -> Self:
        """An axis with round ticks that has room for the values; one that is not logarithmic starts at 0."""
        finite = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)] or [1.0]
        if not is_log:
            high = max(finite) * 1.05 or 1.0
            step = _round_step(high / _MOST_TICKS)
            ticks = [step * number for number in range(int(high / step) + 1)]
            return cls(title, 0.0, high, [(tick, f"{tick:g}") for tick in ticks])
        decades = range(math.floor(math.log10(min(finite))), math.ceil(math.log10(max(finite) * 1.01)) + 1)
        steps = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
        low = max(step for step in steps if step <= min(finite) * (1 + 1e-9))
        high = min((step for step in steps if step >= max(finite) and step > low), default=steps[-1])
        ticks = [step for step in steps if low <= step <= high]
        if len(ticks) > _MOST_TICKS:
            ticks = [tick for tick in ticks if f"{tick:e}".startswith("1")]
        return cls(title, low, high, [(tick, f"{tick:g}") for tick in ticks], is_log=True)

    @classmethod
    def between(cls, title: str, low: float, high: float) -> Self:
        """An axis from one value to another, with round ticks between them."""
        step = _round_step((high - low) / (_MOST_TICKS - 2))
        ticks = [round(number * step, 12) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return cls(title, low, high, [(tick, f"{tick:g}") for tick in ticks])

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the axis's start, 1 at its end."""
        if self.is_log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(slots=True, frozen=True)
class Plot:
    """A rectangle for data between two axes.

    Attributes:
        across: The axis below.
        up: The axis beside.
        width: Of the whole chart.
        height: Of the whole chart.
        left: Room for the words of `up`.
        right: Margin.
        top: Room for the title of `up`.
        bottom: Room for the words and the title of `across`.
    """

    across: Axis
    up: Axis
    width: int = 760
    height: int = 280
    left: int = 58
    right: int = 26
    top: int = 22
    bottom: int = 38

    @property
    def floor(self) -> int:
        """Where `across` is drawn."""
        return self.height - self.bottom

    @property
    def end(self) -> int:
        """Where `across` ends."""
        return self.width - self.right

    def x(self, value: float) -> float:
        return self.left + self.across.share(value) * (self.end - self.left)

    def y(self, value: float) -> float:
        return self.floor - self.up.share(value) * (self.floor - self.top)

    def drawn(self, content: str) -> str:
        """The content upon the grid, with the words of the axes."""
        parts = [line("grid", self.left, self.y(value), self.end, self.y(value)) for value, _ in self.up.ticks]
        parts += [label(self.left - 7, self.y(value) + 4, word, "end") for value, word in self.up.ticks]
        widest = max((len(word) for _, word in self.across.ticks), default=0)
        step = math.ceil(len(self.across.ticks) * (widest + 1) * _DIGIT / (self.end - self.left))
        parts += [label(self.x(value), self.floor + 16, word, "middle") for value, word in self.across.ticks[::step]]
        parts += [label(self.end, self.height - 4, self.across.title, "end"), label(0, 12, self.up.title)]
        parts.append(line("axis", self.left, self.floor, self.end, self.floor))
        return "".join(parts) + content

    def svg(self, description: str, content: str, kind: str = "") -> str:
        """The chart for a page with a style sheet; the description is for those who do not see it."""
        named = f'class="{kind}" ' if kind else ""
        head = f'<svg {named}role="img" aria-label="{escape(description)}" viewBox="0 0 {self.width} {self.height}">'
        return f"{head}{self.drawn(content)}</svg>"


def svg_file(
    title: str, width: float, height: float, parts: Sequence[str], top: float = 0.0, scale: float = 1.0
) -> str:
    """A chart as a file of its own: `parts` on a ground that follows the reader's light or dark scheme.

    It is shown `scale` times as large as it is drawn.
    """
    size = f'width="{scale * width:g}" height="{scale * height:g}" viewBox="0 {top:g} {width:g} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" {size}>'
    ground = f'<rect class="ground" x="0" y="{top:g}" width="{width:g}" height="{height:g}"/>'
    return "\n".join([head, f"<style>{FILE_STYLE}</style>", ground, *parts, "</svg>"]) + "\n"


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def rect(kind: str, x: float, y: float, width: float, height: float, title: str = "") -> str:
    """A bar; the title shows where a pointer rests on it."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="1">{inside}</rect>'
    )


def label(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _round_step(least: float) -> float:
    decade = 10.0 ** math.floor(math.log10(least))
    return next(decade * digit for digit in (1, 2, 5, 10) if decade * digit >= least)
