"""Plots by matplotlib, as SVG whose colors follow the reader's light or dark scheme: in pages, and as files."""

from __future__ import annotations

import functools
import io
import math
import os
import re
import tempfile
import textwrap
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase
    from numpy.typing import NDArray

    Points = Sequence[tuple[float, float]]

_HERE = Path(__file__).parent
_STYLE = (_HERE / "colours.css").read_text(encoding="utf-8")
_COLOURS = dict(re.findall(r"--(\w+): (#\w{6})", _STYLE.partition("@media")[0]))
"""Colors of the light scheme, by name. What matplotlib draws in one of them gets that color's CSS variable."""

_FONT_PX = 11.5
_LETTER_PX, _TITLE_LETTER_PX, _KEY_PX = 6.7, 8.0, 40
_ROW_PX = 18
_FILE_WIDTH, _SHOWN_WIDTH = 560, 760
"""Files are shown larger than they are drawn, so that letters are readable on a phone."""
_WIDE, _NARROW, _HALF = ("wide", 760), ("narrow", 350), ("", 410)
"""Classes and widths of plots in pages. The style sheet shows the wide or the narrow one."""

_SMALLEST = 1e-16
"""Smaller distances are rounding errors of float64; they are drawn here."""
_BINS = 24
_MAX_LABELS, _MAX_TICKS = 1000, 7
_ROUND_TICKS = (1.0, 2.0, 5.0)
_PLAIN = "{x:g}"


class Plot(Protocol):
    """Draws itself into a figure or a part of one; `height` is in pixels."""

    @property
    def height(self) -> int: ...

    def draw(self, figure: FigureBase) -> None: ...


@dataclass(slots=True, frozen=True)
class Series:
    """A line.

    Attributes:
        name: Name in the legend; one that begins with `_` is not shown.
        colour: A color of `colours.css`.
        points: Pairs (x, y); a y that is not a number interrupts the line.
        dots: Single points beside the line.
        style: Line style, as in matplotlib.
    """

    name: str
    colour: str
    points: Points
    dots: Points = ()
    style: str = "-"


@dataclass(slots=True, frozen=True)
class Axis:
    """An axis of a plot.

    Attributes:
        title: Label, with the unit.
        is_log: Whether it is logarithmic. A linear axis begins at 0.
        high: Where it ends; None ends it beyond the last value.
        ticks: Marked values and their labels; None marks round values.
    """

    title: str
    is_log: bool = False
    high: float | None = None
    ticks: Mapping[float, str] | None = None

    def apply(self, axes: Axes, name: Literal["x", "y"]) -> None:
        """Sets the scale, limits and ticks of one direction of axes that hold data."""
        from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter  # noqa: PLC0415

        ruler = axes.xaxis if name == "x" else axes.yaxis
        if self.is_log:
            axes.set(**{f"{name}scale": "log"})
            ruler.set_major_locator(LogLocator(subs=_ROUND_TICKS))
            ruler.set_minor_locator(NullLocator())
        ruler.set_major_formatter(StrMethodFormatter(_PLAIN))
        if self.ticks is not None:
            axes.set(**{f"{name}ticks": list(self.ticks), f"{name}ticklabels": list(self.ticks.values())})
        axes.set(**{f"{name}lim": (None if self.is_log else 0.0, self.high)})


@dataclass(slots=True, frozen=True)
class Lines:
    """A line chart. `limits` are values of `up` that are marked with a line."""

    across: Axis
    up: Axis
    series: Sequence[Series]
    limits: Sequence[tuple[float, str]] = ()
    height: int = 250

    def draw(self, figure: FigureBase) -> None:
        axes = _axes(figure, self.across.title, self.up.title)
        alone = len(self.series) + len(self.limits) == 1
        for entry in self.series:
            colour, name = _COLOURS[entry.colour], f"_{entry.name}" if alone else entry.name
            axes.plot(*_finite(entry.points), entry.style, color=colour, label=name, gid="series")
            if entry.dots:
                axes.plot(*_finite(entry.dots), "o", color=colour, markersize=5)
        for value, words in self.limits:
            axes.axhline(value, color=_COLOURS["red"], linestyle="--", label=words, gid="limit")
        self.across.apply(axes, "x")
        self.up.apply(axes, "y")


@dataclass(slots=True, frozen=True)
class Shares:
    """One stacked bar: name, color and size of each part."""

    title: str
    parts: Sequence[tuple[str, str, float]]
    height: int = 100

    def draw(self, figure: FigureBase) -> None:
        axes = _axes(figure, self.title)
        left = 0.0
        for name, colour, size in self.parts:
            axes.barh(0, size, left=left, color=_COLOURS[colour], label=name, linewidth=0)
            left += size
        axes.set(yticks=[], xlim=(0, left or 1.0))
        axes.grid(visible=False)


@dataclass(slots=True, frozen=True)
class Histogram:
    """Histogram of the distances of texts from a reference, over a logarithmic axis.

    Attributes:
        values: A distance for each text; values that are not numbers are left out.
        title: What the values are.
        limit: Maximum allowed value, drawn as a line; None draws none.
        limit_name: Label of the limit.
    """

    values: NDArray[np.float64]
    title: str
    limit: float | None
    limit_name: str = "limit"
    height: int = 230

    def draw(self, figure: FigureBase) -> None:
        from matplotlib.ticker import MaxNLocator  # noqa: PLC0415  see `_library`

        axes = _axes(figure, self.title, "texts")
        exponents = np.log10(np.maximum(self.values[np.isfinite(self.values)], _SMALLEST))
        marked = [] if self.limit is None or self.limit <= 0 else [math.log10(self.limit)]
        shown = [*exponents.tolist(), *marked] or [0.0]
        low = math.floor(min(shown))
        high = max(low + 1, math.ceil(max(shown)))
        counts, _, bars = axes.hist(exponents, _BINS, range=(low, high), color=_COLOURS["blue"], rwidth=0.9)
        if len(exponents) < _MAX_LABELS:
            axes.bar_label(bars, [f"{count:.0f}" if count else "" for count in counts], fontsize=_FONT_PX - 2)  # type: ignore[arg-type]
        for limit in marked:
            axes.axvline(limit, color=_COLOURS["orange"], linestyle="--", label=self.limit_name, gid="limit")
        ticks = range(low, high + 1, (high - low) // _MAX_TICKS + 1)
        axes.set_xticks(ticks, [f"1e{tick}" for tick in ticks])
        axes.set(xlim=(low, high), ylim=(0, 1.1 * max(1.0, float(np.max(counts)))))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))


@dataclass(slots=True, frozen=True)
class Scatter:
    """Pairs of numbers, float64 [n, 2], with the diagonal on which both are equal."""

    points: NDArray[np.float64]
    across: str
    up: str
    height: int = 230

    def draw(self, figure: FigureBase) -> None:
        axes = _axes(figure, self.across, self.up)
        shown = self.points[np.isfinite(self.points).all(axis=1)]
        # A dot is a line of length 0, so one path holds all of them.
        dots = np.stack([shown, shown, np.full_like(shown, np.nan)], axis=1).reshape(-1, 2)
        axes.plot(*dots.T, color=_COLOURS["blue"], alpha=0.5, linewidth=4, solid_capstyle="round", gid="points")
        if len(shown):
            ends = [shown.min(), shown.max()]
            axes.plot(ends, ends, color=_COLOURS["faint"], linestyle="--", linewidth=1)


@dataclass(slots=True, frozen=True)
class Bars:
    """A bar chart: in each panel a bar per subject, from 0 to its median, with a line from minimum to maximum.

    Attributes:
        title: What the figure is.
        decimals: Decimal places of the numbers beside the bars.
        subjects: Name and color of each.
        panels: By title: (median, minimum, maximum) of each subject.
    """

    title: str
    decimals: int
    subjects: Sequence[tuple[str, str]]
    panels: Mapping[str, Sequence[tuple[float, float, float]]]

    @property
    def height(self) -> int:
        return 70 + 15 * len(self.subjects)

    def draw(self, figure: FigureBase) -> None:
        figure.suptitle(self.title, x=0.01, ha="left", fontsize=_FONT_PX, weight="bold", color=_COLOURS["ink"])
        names, colours = zip(*self.subjects, strict=True)
        places = range(len(names))
        panels = figure.subplots(1, len(self.panels), sharey=True, squeeze=False)[0]
        for axes, (title, bars) in zip(panels, self.panels.items(), strict=True):
            medians, low, high = np.array(bars).T
            axes.barh(places, medians, color=[_COLOURS[colour] for colour in colours], height=0.7)
            axes.hlines(places, low, high, color=_COLOURS["ink"], linewidth=1)
            for place, (median, _, end) in zip(places, bars, strict=True):
                beside = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "color": _COLOURS["ink"]}
                axes.annotate(f"{median:.{self.decimals}f}", (max(median, end), place), fontsize=_FONT_PX - 1, **beside)
            axes.set(xticks=[], yticks=places, yticklabels=names, xlim=(0, 1.35 * max(high)))
            axes.set_title(title, loc="left")
            axes.spines["bottom"].set_visible(False)
        panels[0].invert_yaxis()


def in_page(description: str, plot: Plot, *, half: bool = False) -> str:
    """A plot for a page with the style sheet. Plots with `half` stand side by side.

    The description is the text alternative, and must be unique in the page.
    """
    # Letters of a plot that shrank would be unreadable on a phone, so the page shows one of two plots.
    return "".join(_svg(description, kind, width, plot) for kind, width in ([_HALF] if half else [_WIDE, _NARROW]))


def as_file(title: str, *plots: Plot, width: int = _FILE_WIDTH) -> str:
    """Plots below one another as a file of its own, under a title and one legend."""
    return _svg(title, "file", width, *plots)


def _svg(title: str, kind: str, width: int, *plots: Plot) -> str:
    library = _library()
    is_file = kind == "file"
    # A file has a margin: its reader's letters may be wider than those that were measured.
    margin = {"figure.constrained_layout.w_pad": 14 / 72, "legend.borderaxespad": 1.0} if is_file else {}
    with library.rc_context({**margin, "svg.hashsalt": f"{title} {kind}"}, _HERE / "plots.mplstyle"):
        figure = library.figure.Figure(layout="constrained", facecolor=_COLOURS["card"] if is_file else "none")
        heights = [plot.height for plot in plots]
        parts = figure.subfigures(len(plots), 1, squeeze=False, height_ratios=heights)[:, 0]
        for plot, part in zip(plots, parts, strict=True):
            plot.draw(part)
        height = sum(heights)
        height += _add_key(figure, title if is_file else "", width)
        figure.set_size_inches(width / 72, height / 72)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None}, facecolor=figure.get_facecolor())
    _, begin, drawn = written.getvalue().partition('<g id="figure_1">')
    drawn = _use_variables(begin + drawn.rpartition("</svg>")[0])
    named = f'role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {height}"'
    if not is_file:
        return f'<svg class="plot {kind}" {named}>{drawn}</svg>'
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    scale = max(1.0, _SHOWN_WIDTH / width)
    size = f'width="{scale * width:.0f}" height="{scale * height:.0f}"'
    return f"<svg {spaces} {named} {size}>\n<style>\n{_STYLE}</style>\n{drawn}\n</svg>\n"


@functools.cache
def _library() -> Any:  # noqa: ANN401  a module
    """Imports matplotlib, which finds the machine's fonts anew each time and keeps nothing in the user's home.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.setdefault("MPLCONFIGDIR", folder)
        try:
            import matplotlib.figure  # noqa: PLC0415  see above
        finally:
            if before == folder:
                del os.environ["MPLCONFIGDIR"]
    return matplotlib


def _axes(figure: FigureBase, across: str, up: str = "") -> Axes:
    axes = figure.subplots()
    axes.grid(axis="y")
    axes.set_xlabel(across, loc="right")
    axes.set_title(up, loc="left")
    return axes


def _finite(points: Points) -> tuple[list[float], list[float]]:
    """X and y coordinates. Infinite y values become NaN, which is not drawn."""
    return [x for x, _ in points], [y if math.isfinite(y) else math.nan for _, y in points]


def _add_key(figure: Figure, title: str, width: int) -> int:
    """Puts the title and the legend above the plots; returns their height in pixels."""
    found = [axes.get_legend_handles_labels() for axes in figure.get_axes()]
    keys = {name: handle for handles, names in found for handle, name in zip(handles, names, strict=True)}
    if not title and not keys:
        return 0
    lines = textwrap.wrap(title, int(width / _TITLE_LETTER_PX))
    longest = max(map(len, keys), default=0)
    columns = max(1, min(len(keys), int(width / (_LETTER_PX * longest + _KEY_PX))))
    key = figure.legend(
        list(keys.values()),
        list(keys),
        loc="outside upper left",
        ncols=columns,
        title="\n".join(lines),
        alignment="left",
        title_fontproperties={"weight": "bold", "size": _FONT_PX + 1},
        handlelength=1.2,
        labelcolor=_COLOURS["ink"],
    )
    key.get_title().set_color(_COLOURS["ink"])
    return _ROW_PX * (math.ceil(len(keys) / columns) + len(lines))


def _use_variables(drawn: str) -> str:
    """Rewrites matplotlib's SVG: colors become variables, the font is the page's own, and unused ids are removed."""
    for name, colour in _COLOURS.items():
        drawn = drawn.replace(colour, f"var(--{name})")
    drawn = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", drawn)
    drawn = re.sub(r' id="[\w.]+_\d+"| transform="rotate\(-?0 [^"]*"', "", drawn)
    drawn = re.sub(r' id="([a-z]+)"', r' class="\1"', drawn)
    drawn = re.sub(r'(?<= d=)"[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), drawn)
    return re.sub(r"\s*\n\s*", " ", drawn).replace("> <", "><").strip()
