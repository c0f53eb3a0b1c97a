"""The curves of a simulation: an SVG, or a page around it."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from export.charts.lines import Series, chart_file, line_chart
from export.charts.plot import Axis
from loadtest.report.page import page_of, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.capacity.figures import Figures


def svg(title: str, runs: Sequence[Figures], slo_ms: float | None) -> str:
    """p50 and p99 over offered load, as a file of its own."""
    return chart_file(title, *_axes(runs, slo_ms), _lines(runs), _limits(slo_ms))


def html(title: str, verdict: str, facts: Sequence[str], runs: Sequence[Figures], slo_ms: float | None) -> str:
    """The same in a page, with what it rests on."""
    head = ("offered/s", "answered/s", "p50 ms", "p99 ms", "p99 ms of all asked")
    rows = [
        [_number(value) for value in (run.offered_per_s, run.answered_per_s, run.p50_ms, run.p99_ms, run.slo_ms)]
        for run in sorted(runs, key=lambda run: run.offered_per_s)
    ]
    parts = [
        f"<h1>Simulated: {escape(title)}</h1>",
        f'<div class="verdict">{escape(verdict)}</div>',
        "<p>A simulation, not a measurement: the server's own scheduler over a table of costs.</p>",
        "<h2>Latency over offered load</h2>",
        f"<figure>{line_chart(title, *_axes(runs, slo_ms), _lines(runs), _limits(slo_ms))}</figure>",
        table(head, rows, words=()),
        "<h2>What it rests on</h2>",
        f"<ul>{''.join(f'<li>{escape(fact)}</li>' for fact in facts)}</ul>",
    ]
    return page_of(f"Simulated: {title}", parts)


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"


def _axes(runs: Sequence[Figures], slo_ms: float | None) -> tuple[Axis, Axis]:
    times = [value for run in runs for value in (run.p50_ms, run.p99_ms)] + ([slo_ms] if slo_ms else [])
    across = Axis.of("offered requests a second", [run.offered_per_s for run in runs])
    return across, Axis.of("ms", times, is_log=True)


def _lines(runs: Sequence[Figures]) -> list[Series]:
    ordered = sorted(runs, key=lambda run: run.offered_per_s)
    return [
        Series("p50", "blue", [(run.offered_per_s, run.p50_ms) for run in ordered]),
        Series("p99", "orange", [(run.offered_per_s, run.p99_ms) for run in ordered]),
    ]


def _limits(slo_ms: float | None) -> list[tuple[float, str]]:
    return [(slo_ms, f"SLO {slo_ms:g} ms")] if slo_ms else []
