"""How far answers lie from a reference: a histogram over a logarithmic axis, and a scatter plot."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from export.charts.plot import Axis, Plot, label, line, rect

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SMALLEST = 1e-16
"""Distances below this are rounding of float64; they are drawn here."""

_BINS = 24
_MOST_TICKS = 6


def distances(values: NDArray[np.float64], title: str, limit: float | None, limit_name: str = "limit") -> str:
    """A histogram of the distances of texts, over a logarithmic axis.

    Args:
        values: A distance for each text; what is not a number is left out.
        title: What they are.
        limit: What none may exceed, drawn as a line; None draws none.
        limit_name: What stands beside the line.
    """
    exponents = np.log10(np.maximum(values[np.isfinite(values)], _SMALLEST))
    marked = [] if limit is None or limit <= 0 else [math.log10(limit)]
    shown = [*exponents.tolist(), *marked]
    low = math.floor(min(shown, default=0))
    high = max(low + 1, math.ceil(max(shown, default=1)))
    counts, edges = np.histogram(exponents, bins=_BINS, range=(low, high))
    most = int(counts.max(initial=1))
    step = max(1, math.ceil((high - low) / _MOST_TICKS))
    across = Axis(title, low, high, [(exponent, f"1e{exponent}") for exponent in range(low, high + 1, step)])
    plot = _small(across, Axis("texts", 0, most, [(0, "0"), (most, str(most))]))
    drawn = [
        rect(
            "bar",
            plot.x(start) + 0.75,
            plot.y(count),
            plot.x(end) - plot.x(start) - 1.5,
            plot.y(0) - plot.y(count),
            f"{count} texts between {10**start:.1e} and {10**end:.1e}",
        )
        for count, (start, end) in zip(counts.tolist(), pairwise(edges.tolist()), strict=True)
        if count
    ]
    for exponent in marked:
        at = plot.x(exponent)
        shift, anchor = (4, "start") if at < plot.width / 2 else (-4, "end")
        drawn.append(line("limit", at, plot.top - 12, at, plot.floor))
        drawn.append(label(at + shift, plot.top - 4, limit_name, anchor, "limit"))
    return plot.svg(f"Histogram: {title}", "".join(drawn))


def scatter(points: NDArray[np.float64], across: str, up: str) -> str:
    """Numbers beside others, with the diagonal on which they would be the same.

    Args:
        points: float64 [n, 2]; a point that is not finite is left out.
        across: What the first number of a point is.
        up: What the second is.
    """
    shown = points[np.isfinite(points).all(axis=1)]
    low, high = (float(shown.min()), float(shown.max())) if len(shown) else (0.0, 1.0)
    margin = (high - low) * 0.04 or 1.0
    low, high = low - margin, high + margin
    plot = _small(Axis.between(across, low, high), Axis.between(up, low, high))
    dots = "".join(f"M{plot.x(x):.1f} {plot.y(y):.1f}h0" for x, y in shown.tolist())
    diagonal = line("diagonal", plot.x(low), plot.y(low), plot.x(high), plot.y(high))
    return plot.svg(f"Scatter plot of {len(shown)} numbers", f'{diagonal}<path class="point" d="{dots}"/>')


def _small(across: Axis, up: Axis) -> Plot:
    """Two of them stand side by side on a page."""
    return Plot(across, up, width=360, height=216, left=40, right=18, bottom=36)
