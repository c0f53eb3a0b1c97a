"""The pages of a simulation and of a sizing, which need no network, and their pictures as files of their own."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from export.charts.lines import Series, chart_file, line_chart
from export.charts.plot import Axis
from loadtest.capacity.report import HEAD, cells, reason
from loadtest.capacity.sensitivity import FACTORS
from loadtest.report.page import page_of, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loadtest.capacity.figures import Figures
    from loadtest.capacity.plan import Objective
    from loadtest.capacity.report import Sizing
    from loadtest.capacity.sensitivity import Sensitivity

COLOURS = ("blue", "orange", "green", "violet", "grey")

_SCALES = (0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0)
"""By which the rate is varied."""
_LIMITS = (0.25, 0.35, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0)
_WORDS = 3


def simulation_svg(title: str, runs: Sequence[Figures], slo_ms: float | None) -> str:
    """p50 and p99 over offered load, as a file of its own."""
    return chart_file(title, *_axes(runs, slo_ms), _lines(runs), _limits(slo_ms))


def simulation(title: str, verdict: str, facts: Sequence[str], runs: Sequence[Figures], slo_ms: float | None) -> str:
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
        _list(facts),
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


def sizing(sizing: Sizing, found: Sequence[Sensitivity]) -> str:
    """The page; `found` are at most as many candidates as there are colours."""
    load = sizing.load
    reasons = [f"{plan.name} {plan.precision}: {why}" for plan in sizing.plans if (why := reason(plan, load))]
    missed = "" if sizing.holds else " missed"
    limit = load.objective.limit_ms
    parts = [
        f"<h1>How many: {escape(sizing.encoder.name)}</h1>",
        f'<p class="faint">{escape(sizing.asked())}</p>',
        f'<div class="verdict{missed}"><strong>{escape(sizing.verdict())}</strong></div>',
        table(HEAD, [cells(plan, load) for plan in sizing.plans], words=range(_WORDS)),
        _list(reasons),
    ]
    if found:
        parts += [
            _chart(
                "Cost over the rate",
                "texts a second",
                found,
                [load.rate * scale for scale in _SCALES],
                lambda one, rate: one.price(rate, limit),
            ),
            _chart(
                "Cost over the objective",
                f"limit of p{load.objective.percent:g}, ms",
                found,
                [limit * scale for scale in _LIMITS],
                lambda one, other: one.price(load.rate, other),
            ),
            _chart(
                "Cost over the lengths",
                "texts as long, times",
                found,
                FACTORS,
                lambda one, factor: one.price(load.rate, limit, factor),
            ),
            _latency(found, load.objective),
        ]
    parts += [
        "<h2>What it rests on</h2>",
        _list(sizing.facts()),
        "<h2>Not known or assumed</h2>",
        _list(sizing.unknown()),
    ]
    return page_of(f"How many: {sizing.encoder.name}", parts)


def sizing_svg(sizing: Sizing, found: Sequence[Sensitivity]) -> str:
    """Cost over the rate, as a file of its own."""
    load = sizing.load
    limit = load.objective.limit_ms
    lines, across, up = _costs(
        "texts a second", found, [load.rate * scale for scale in _SCALES], lambda one, rate: one.price(rate, limit)
    )
    title = f"{sizing.encoder.name}, {load.objective}: what the devices cost in USD an hour, by example prices"
    return chart_file(title, across, up, lines)


def _chart(
    title: str,
    across: str,
    found: Sequence[Sensitivity],
    values: Sequence[float],
    cost: Callable[[Sensitivity, float], float],
) -> str:
    lines, below, beside = _costs(across, found, values, cost)
    return f"<h2>{escape(title)}</h2>\n<figure>{line_chart(title, below, beside, lines)}</figure>"


def _costs(
    across: str,
    found: Sequence[Sensitivity],
    values: Sequence[float],
    cost: Callable[[Sensitivity, float], float],
) -> tuple[list[Series], Axis, Axis]:
    """A line for each candidate, and both axes; a candidate without a price counts its devices."""
    lines = [
        Series(f"{one.plan.name} {one.plan.precision}", colour, [(value, cost(one, value)) for value in values])
        for one, colour in zip(found, COLOURS, strict=False)
    ]
    prices = [value for line in lines for _, value in line.points]
    up = (
        "USD an hour" if all(one.plan.device.price_per_hour is not None for one in found) else "USD an hour, or devices"
    )
    return lines, Axis.of(across, values, is_log=True), Axis.of(up, prices, is_log=True)


def _latency(found: Sequence[Sensitivity], objective: Objective) -> str:
    """The objective's percentile of one replica over its rate."""
    lines = [
        Series(f"{one.plan.name} {one.plan.precision}", colour, one.curves[1.0])
        for one, colour in zip(found, COLOURS, strict=False)
    ]
    rates, times = zip(*(point for line in lines for point in line.points), strict=True)
    limits = [(objective.limit_ms, str(objective))]
    across = Axis.of("texts a second of one replica", rates)
    up = Axis.of(f"p{objective.percent:g}, ms", times, is_log=True)
    title = "Latency of one replica"
    return f"<h2>{title}</h2>\n<figure>{line_chart(title, across, up, lines, limits)}</figure>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
