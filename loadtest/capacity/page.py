"""HTML pages of simulations and sizings, which need no network, and their plots as SVG files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from export.pages import html
from export.pages.plots import Axis, Lines, Series, as_file, in_page
from export.pages.tables import untitled
from loadtest.capacity.sensitivity import FACTORS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loadtest.capacity.figures import Figures
    from loadtest.capacity.plan import Objective
    from loadtest.capacity.report import Sizing
    from loadtest.capacity.sensitivity import Sensitivity

COLOURS = ("blue", "orange", "green", "violet", "grey")

_HERE = Path(__file__).parent
_SCALES = (0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0)
"""Factors by which the rate is varied."""
_LIMITS = (0.25, 0.35, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0)


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
    return html.render(
        _HERE / "simulation.html",
        title=f"Simulated: {title}",
        verdict=verdict,
        facts=facts,
        latency=in_page(title, _over_load(runs, slo_ms)),
        runs=untitled(head, rows),
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


def sizing(sizing: Sizing, found: Sequence[Sensitivity]) -> str:
    """The page of a sizing; `found` has at most as many candidates as there are colors."""
    load = sizing.load
    limit = load.objective.limit_ms
    plots = {
        "Cost by rate": _over_rate(sizing, found),
        "Cost by objective": _costs(
            f"limit of p{load.objective.percent:g}, ms",
            found,
            [limit * scale for scale in _LIMITS],
            lambda one, other: one.price(load.rate, other),
        ),
        "Cost by text length": _costs(
            "text length, multiple", found, FACTORS, lambda one, factor: one.price(load.rate, limit, factor)
        ),
        "Latency of one replica": _latency(found, load.objective),
    }
    return html.render(
        _HERE / "sizing.html",
        title=f"Sizing: {sizing.encoder.name}",
        sizing=sizing,
        plots={title: in_page(title, plot) for title, plot in plots.items()} if found else {},
    )


def sizing_svg(sizing: Sizing, found: Sequence[Sensitivity]) -> str:
    """An SVG file of the cost over the rate."""
    title = f"{sizing.encoder.name}, {sizing.load.objective}: device cost in USD per hour, at example prices"
    return as_file(title, _over_rate(sizing, found))


def _over_rate(sizing: Sizing, found: Sequence[Sensitivity]) -> Lines:
    load = sizing.load
    rates = [load.rate * scale for scale in _SCALES]
    return _costs("texts/s", found, rates, lambda one, rate: one.price(rate, load.objective.limit_ms))


def _costs(
    across: str,
    found: Sequence[Sensitivity],
    values: Sequence[float],
    cost: Callable[[Sensitivity, float], float],
) -> Lines:
    """A line for each candidate; without a price, the line shows its number of devices."""
    priced = all(one.plan.device.price_per_hour is not None for one in found)
    lines = [_series(one, colour, [(value, cost(one, value)) for value in values]) for one, colour in _coloured(found)]
    up = Axis("USD per hour" if priced else "USD per hour, or devices", is_log=True)
    return Lines(Axis(across, is_log=True), up, lines)


def _latency(found: Sequence[Sensitivity], objective: Objective) -> Lines:
    """The objective's percentile of one replica over its rate."""
    lines = [_series(one, colour, one.curves[1.0]) for one, colour in _coloured(found)]
    up = Axis(f"p{objective.percent:g}, ms", is_log=True)
    return Lines(Axis("texts/s of one replica"), up, lines, [(objective.limit_ms, str(objective))])


def _coloured(found: Sequence[Sensitivity]) -> list[tuple[Sensitivity, str]]:
    return list(zip(found, COLOURS, strict=False))


def _series(one: Sensitivity, colour: str, points: Sequence[tuple[float, float]]) -> Series:
    return Series(f"{one.plan.name} {one.plan.precision}", colour, points)
