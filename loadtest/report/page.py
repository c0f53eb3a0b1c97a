"""HTML pages of a load test. Each is one file that needs no network."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from bertserve.export.pages import html
from bertserve.export.pages.plots import Axis, Lines, Series, Shares, in_page
from bertserve.export.pages.tables import Table, untitled
from bertserve.loadtest.report import compare
from bertserve.loadtest.report.result import LATE_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.loadtest.report.capacity import Capacity
    from bertserve.loadtest.report.histogram import Histogram
    from bertserve.loadtest.report.result import Result
    from bertserve.loadtest.report.slo import Verdict

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_STAGE_COLOURS = ("red", "orange", "violet", "grey", "blue", "green")
_MAX_POINTS = 400


def report(result: Result, verdicts: Sequence[Verdict]) -> str:
    """The page of a run."""
    words = caution(result)
    tone = "" if all(verdict.held for verdict in verdicts) else "bad"
    judged = [("held" if v.held else "missed", f": {v.objective}, found {v.found}") for v in verdicts]
    return html.render(
        f"Load test: {result.facts['scenario']}",
        [
            result.facts["purpose"],
            f"{result.facts['target']}, {result.facts['date']}",
            html.Verdict(judged or [("", "No objectives were given. Set --slo to check some.")], tone),
            *([html.Verdict([("Caution", f": {words}.")], "caution")] if words else []),
            _tiles(result),
            *(_latency(result) if len(result.latency) else ["Nothing was answered."]),
            html.Section("Throughput", [_throughput(result)]),
            html.Section("Where the time goes", _stages(result)),
            html.Section("Errors", [_faults(result)]),
            html.Section("Load generator", [_generator(result)]),
            _run(result.facts),
        ],
    )


def capacity_report(found: Capacity) -> str:
    """The page of a capacity search."""
    points = sorted(found.points, key=lambda point: point.rate)
    rows = [
        (
            f"{point.rate:.1f}",
            _ms(point.p50_ms),
            f"{_ms(point.p99_ms)} ({_ms(point.p99_low_ms)} to {_ms(point.p99_high_ms)})",
            f"{point.good_per_s:.1f}",
            f"{point.failed_percent:.2f}",
            point.verdict(),
        )
        for point in points
    ]
    columns = ("offered/s", "p50 ms", "p99 ms (noise)", "good/s", "failed %", "objectives")
    latency = [
        _over_rate("p50", "blue", [(point.rate, point.p50_ms) for point in points]),
        _over_rate("p99", "orange", [(point.rate, point.p99_ms) for point in points]),
    ]
    goodput = [
        Series("offered", "grey", [(0.0, 0.0), (points[-1].rate, points[-1].rate)]),
        _over_rate("goodput", "green", [(point.rate, point.good_per_s) for point in points]),
    ]
    across = Axis("offered requests/s")
    over_rate = _plot(
        "Latency over rate",
        Lines(across, Axis("ms", is_log=True), latency),
        "Each dot is a run; the line connects the medians. Runs at the same rate differ only by noise.",
    )
    good = _plot(
        "Goodput over rate",
        Lines(across, Axis("requests/s"), goodput),
        "Answers within the widest latency objective. The gap to the gray line was late or failed.",
    )
    tone = "bad" if not found.highest else "" if found.is_decided else "caution"
    return html.render(
        "Capacity",
        [
            f"{found.facts['target']}, {found.facts['date']}",
            html.Verdict([(found.verdict(), f" at {', '.join(found.slo)}"), ("", found.confidence())], tone),
            html.Section("Latency over rate", [f"{found.shape()}.", over_rate]),
            html.Section("Goodput over rate", [good]),
            html.Section("Runs", [untitled(columns, rows)]),
            _run(found.facts),
        ],
    )


def comparison(first: Result, second: Result) -> str:
    """The page that compares two runs.

    Raises:
        BenchError: They cannot be compared.
    """
    found, changed = compare.table_of(first, second), compare.other_facts(first, second)
    runs = {name: f"{run.facts['target']}, {run.facts['date']}" for name, run in (("A", first), ("B", second))}
    return html.render(
        found.title,
        [runs, html.Section("", [found]), *([html.Section("The loads differ", changed)] if changed else [])],
    )


def _run(facts: Mapping[str, str]) -> html.Section:
    shown = {name: html.Code(value) if name == "command" else value for name, value in facts.items()}
    return html.Section("Run", [{name: shown[name] for name in shown if name not in {"purpose", "date"}}])


def caution(result: Result) -> str:
    """A warning if the generator limited the run; empty if it kept up."""
    if result.unsent:
        return (
            f"the load generator was the limit: {result.unsent} of {result.offered} requests were never sent, because "
            "all of its connections were busy for too long; they do not count as server errors"
        )
    if not result.generator_was_the_limit:
        return ""
    return (
        f"the load generator was the limit: {_ms(result.generator_added_ms)} ms of the p99 is its own lateness; run it "
        "on cores that the server does not use, or on another machine"
    )


def _over_rate(name: str, colour: str, runs: Sequence[tuple[float, float]]) -> Series:
    """Every run as a dot, and a line through the median of each rate."""
    rates = sorted({rate for rate, _ in runs})
    medians = [(rate, statistics.median(value for other, value in runs if other == rate)) for rate in rates]
    return Series(name, colour, medians, runs)


def _limits(result: Result) -> list[tuple[float, str]]:
    return [] if result.good_limit_ms is None else [(result.good_limit_ms, f"{result.good_limit_ms:g} ms")]


def _plot(name: str, lines: Lines | Shares, caption: str) -> html.Plots:
    return html.Plots([(in_page(name, lines), caption)])


def _tiles(result: Result) -> html.Tiles:
    latency, shown = result.latency, [percent for percent in PERCENTILES if result.latency.resolves(percent)]
    return html.Tiles(
        {
            **{f"p{percent:g}": f"{_ms(latency.percentile_ms(percent))} ms" for percent in shown},
            **({"max": f"{_ms(latency.max_ms())} ms"} if len(latency) else {}),
            "answered": f"{result.answered_per_s:.1f}/s",
            "failed": f"{result.failed_percent:.2f}%",
            **({"never sent": f"{result.unsent}"} if result.unsent else {}),
        }
    )


def _latency(result: Result) -> list[html.Section]:
    return [
        html.Section("Latency over percentiles", [_over_percentiles(result)]),
        html.Section("Latency over time", [_over_time(result), _kinds(result)]),
    ]


def _over_percentiles(result: Result) -> html.Plots:
    curve = _percentile_curve(result.latency)
    nines = math.ceil(max(x for x, _ in curve))
    ticks = {0.0: "0", **{float(n): f"{100 - 10.0 ** (2 - n):g}%" for n in range(1, nines + 1)}}
    across = Axis("percentile", high=float(nines), ticks=ticks)
    return _plot(
        "Latency over percentiles",
        Lines(across, Axis("ms", is_log=True), [Series("all", "blue", curve)], _limits(result)),
        "From the scheduled send time to the complete answer. Each step to the right is a tenth of the remaining"
        " requests.",
    )


def _percentile_curve(latency: Histogram) -> list[tuple[float, float]]:
    """Points (negative decimal logarithm of the share above, latency in ms) up to the last request."""
    values, counts = latency.distribution()
    whole, passed, points = len(latency), 0, []
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        points.append((-math.log10(1 - passed / whole), value))
        passed += count
    # The plot cannot show more than two decimals of a nine.
    thinned = {round(x * _MAX_POINTS / 4): (x, y) for x, y in points}
    return [*thinned.values(), (math.log10(whole) + 0.05, latency.max_ms())]


def _over_slices(result: Result, name: str, colour: str, values: Sequence[float]) -> Series:
    moments = [(index + 0.5) * result.slice_s for index in range(len(result.slices))]
    return Series(name, colour, list(zip(moments, values, strict=True)))


def _over_time(result: Result) -> html.Plots:
    lines = [
        _over_slices(result, name, colour, [part.latency.percentile_ms(p) for part in result.slices])
        for name, colour, p in (("greatest", "grey", 100.0), ("p99", "orange", 99.0), ("p50", "blue", 50.0))
    ]
    across = Axis("seconds since the start", high=result.seconds)
    return _plot(
        "Latency over time",
        Lines(across, Axis("ms", is_log=True), lines, _limits(result)),
        f"In slices of {result.slice_s:.2g} s, by scheduled send time.",
    )


def _throughput(result: Result) -> html.Plots:
    counts = {
        ("offered", "grey"): [part.offered for part in result.slices],
        ("answered", "blue"): [len(part.latency) for part in result.slices],
        ("good", "green"): [result.good(part) for part in result.slices],
    }
    lines = [_over_slices(result, *key, [count / result.slice_s for count in found]) for key, found in counts.items()]
    limit = "of any latency" if result.good_limit_ms is None else f"within {result.good_limit_ms:g} ms"
    return _plot(
        "Throughput over time",
        Lines(Axis("seconds since the start", high=result.seconds), Axis("requests/s"), lines),
        f"Offered {result.offered_per_s:.1f}/s, answered {result.answered_per_s:.1f}/s, good {result.good_per_s:.1f}/s"
        f" (answers {limit}).",
    )


def _kinds(result: Result) -> Table:
    rows = [
        (name, f"{len(own)}", *(_percentile(own, p) for p in PERCENTILES), _ms(own.max_ms()))
        for name, own in [("all", result.latency), *sorted(result.kinds.items(), key=_by_number)]
    ]
    columns = ("requests", "answered", *(f"p{p:g} ms" for p in PERCENTILES), "max ms")
    return untitled(columns, rows, words=1)


def _stages(result: Result) -> list[html.Part]:
    if not result.stages:
        return ["The server does not report the times of its stages."]
    colours = zip(result.stages.items(), _STAGE_COLOURS, strict=False)
    means = [(name, colour, own.mean_ms()) for (name, own), colour in colours]
    rows = [
        (
            name,
            "client" if index < 2 else "server",  # noqa: PLR2004  the client measures the first two
            _ms(own.mean_ms()),
            *(_percentile(own, p) for p in (50.0, 99.0, 99.9)),
        )
        for index, (name, own) in enumerate(result.stages.items())
    ]
    columns = ("stage", "measured by", "mean ms", "p50 ms", "p99 ms", "p99.9 ms")
    caption = "The mean request, from its scheduled send time. Percentiles of stages do not add up to the total."
    return [_plot("Mean time of each stage", Shares("ms", means), caption), untitled(columns, rows, words=2)]


def _faults(result: Result) -> html.Part:
    rows = [(name, f"{n}", f"{100 * n / result.offered:.2f}%") for name, n in result.faults.most_common()]
    return untitled(("reason", "requests", "share"), rows, words=1) if rows else "None."


def _generator(result: Result) -> dict[str, object]:
    own, null = result.generator, result.generator.null
    lateness = {f"Lateness, p{percent}": f"{_ms(own.lateness.percentile_ms(percent))} ms" for percent in (50, 99)}
    beside = {f"No-op server, p{percent}": f"{_ms(null.percentile_ms(percent))} ms" for percent in (50, 99)}
    return {
        **lateness,
        "Added to the overall p99": f"{_ms(result.generator_added_ms)} ms",
        f"Sent more than {1e3 * LATE_S:g} ms late": f"{own.late} of {result.offered}",
        "CPU time per request": f"{own.cpu_us:.0f} us",
        "Processes": own.processes,
        **({**beside, "No-op server, sent late": f"{own.null_late} of {len(null)}"} if len(null) else {}),
    }


def _by_number(item: tuple[str, object]) -> tuple[str, int]:
    """Sort key: groups the kinds of a task, short texts first. A kind that is named after a file has no length."""
    words = item[0].replace(",", "").split()
    return words[0] if not words[0].isdigit() else "", next((int(word) for word in words if word.isdigit()), 0)


def _percentile(latency: Histogram, percent: float) -> str:
    return _ms(latency.percentile_ms(percent)) if latency.resolves(percent) else "-"


def _ms(value: float) -> str:
    """A time with about three significant digits and at most two decimals."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"  # noqa: PLR2004
