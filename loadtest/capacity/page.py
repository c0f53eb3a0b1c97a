"""The HTML page of a simulation, which needs no network, and its plot as an SVG file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bertserve.export.pages import html
from bertserve.export.pages.plots import Axis, Lines, Series, as_file, in_page
from bertserve.export.pages.tables import untitled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.loadtest.capacity.figures import Figures


def simulation_svg(title: str, runs: Sequence[Figures], slo_ms: float | None) -> str:
    """An SVG file of p50 and p99 over offered load."""
    return as_file(title, _over_load(runs, slo_ms))


def simulation(title: str, verdict: str, facts: Sequence[str], runs: Sequence[Figures], slo_ms: float | None) -> str:
    """The page of a simulation: the plot, the runs and their basis."""
    head = ("offered/s", "answered/s", "p50 ms", "p99 ms", "p99 ms, all requests")
    rows = [
        [_number(value) for value in (run.offered_per_s, run.answered_per_s, run.p50_ms, run.p99_ms, run.slo_ms)]
        for run in sorted(runs, key=lambda run: run.offered_per_s)
    ]
    plot = html.Plots([(in_page(title, _over_load(runs, slo_ms)), "")])
    tone = "bad" if verdict.startswith("BROKEN") else ""
    return html.render(
        f"Simulated: {title}",
        [
            *([html.Verdict([("", verdict)], tone)] if verdict else []),
            "This is a simulation, not a measurement: the server's scheduler runs on a table of batch costs.",
            html.Section("Latency over offered load", [plot, untitled(head, rows)]),
            html.Section("Assumptions and sources", [html.Listing(facts)]),
        ],
    )


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"


def _over_load(runs: Sequence[Figures], slo_ms: float | None) -> Lines:
    ordered = sorted(runs, key=lambda run: run.offered_per_s)
    lines = [
        Series("p50", "blue", [(run.offered_per_s, run.p50_ms) for run in ordered]),
        Series("p99", "orange", [(run.offered_per_s, run.p99_ms) for run in ordered]),
    ]
    limits = [(slo_ms, f"SLO {slo_ms:g} ms")] if slo_ms else []
    return Lines(Axis("offered requests/s"), Axis("ms", is_log=True), lines, limits)
