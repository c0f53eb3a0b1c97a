"""The report of a load test: one HTML file that needs no network."""

from __future__ import annotations

import math
import statistics
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from export.charts.lines import Series, line_chart, stacked_bar
from export.charts.plot import Axis
from loadtest.report import compare
from loadtest.report.result import LATE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.report.capacity import Capacity
    from loadtest.report.histogram import Histogram
    from loadtest.report.result import Result
    from loadtest.report.slo import Verdict

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_STAGE_COLOURS = ("red", "orange", "violet", "grey", "blue", "green")
_MOST_POINTS = 400
_MOST_COLUMNS = 3
"""That fit beside one another on a telephone."""


def report(result: Result, verdicts: Sequence[Verdict]) -> str:
    """The page of a run."""
    facts = result.facts
    parts = [
        f"<h1>Load test: {escape(facts['scenario'])}</h1>",
        f"<p>{escape(facts['purpose'])}</p>" if facts["purpose"] else "",
        f'<p class="faint">{escape(facts["target"])}, {escape(facts["date"])}</p>',
        _verdicts(verdicts),
        _caution(result),
        _headline(result),
        *(_latency(result) if len(result.latency) else ["<p>Nothing was answered.</p>"]),
        _throughput(result),
        _stages(result),
        _faults(result),
        _generator(result),
        _facts(facts),
    ]
    return page_of(f"Load test: {facts['scenario']}", parts)


def capacity_report(found: Capacity) -> str:
    """The page of a search for capacity."""
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
    across = Axis.of("offered requests a second", [point.rate for point in points])
    times = [value for point in points for value in (point.p50_ms, point.p99_ms)]
    lines = [
        _over_rate("p50", "blue", [(point.rate, point.p50_ms) for point in points]),
        _over_rate("p99", "orange", [(point.rate, point.p99_ms) for point in points]),
    ]
    chart = line_chart("Latency over rate", across, Axis.of("ms", times, is_log=True), lines)
    good = _over_rate("goodput", "green", [(point.rate, point.good_per_s) for point in points])
    same = Series("offered", "grey", [(0.0, 0.0), (points[-1].rate, points[-1].rate)])
    up = Axis.of("requests a second", [point.rate for point in points])
    kind = "" if found.highest and found.is_decided else " caution" if found.highest else " missed"
    verdict = (
        f'<div class="verdict{kind}"><strong>{escape(found.verdict())}</strong>'
        f" at {escape(', '.join(found.slo))}<br>{escape(found.confidence())}</div>"
    )
    parts = [
        "<h1>Capacity</h1>",
        f'<p class="faint">{escape(found.facts["target"])}, {escape(found.facts["date"])}</p>',
        verdict,
        "<h2>Latency over rate</h2>",
        f"<p>{escape(found.shape())}.</p>",
        _figure(chart, "Each dot is a run, the line goes through the medians; between runs of one rate lies chance."),
        "<h2>Goodput over rate</h2>",
        _figure(
            line_chart("Goodput over rate", across, up, [same, good]),
            "Answers within the widest latency objective. What lies below the grey line was late or failed.",
        ),
        "<h2>Runs</h2>",
        table(("offered/s", "p50 ms", "p99 ms (noise)", "good/s", "failed %", "objectives"), rows, words=()),
        _facts(found.facts),
    ]
    return page_of("Capacity", parts)


def comparison(first: Result, second: Result) -> str:
    """The page of two runs beside one another.

    Raises:
        BenchError: They cannot be compared.
    """
    found = compare.table_of(first, second)
    changed = compare.other_facts(first, second)
    names = [
        f"{name}: {result.facts['target']}, {result.facts['date']}" for name, result in (("A", first), ("B", second))
    ]
    parts = [
        f"<h1>{escape(found.title)}</h1>",
        *(f'<p class="faint">{escape(name)}</p>' for name in names),
        table(found.columns, found.rows),
        f"<p>{escape(found.note)}</p>",
        *(["<h2>Not the same load</h2>", *(f"<p>{escape(line)}</p>" for line in changed)] if changed else []),
    ]
    return page_of(found.title, parts)


def _over_rate(name: str, colour: str, runs: Sequence[tuple[float, float]]) -> Series:
    """Every run as a dot, and a line through the medians of each rate."""
    rates = sorted({rate for rate, _ in runs})
    medians = [(rate, statistics.median(value for other, value in runs if other == rate)) for rate in rates]
    return Series(name, colour, medians, runs)


def page_of(title: str, parts: Sequence[str]) -> str:
    """A whole page of these parts, with the style sheet inside."""
    css = (files("loadtest.report") / "page.css").read_text(encoding="utf-8")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(filter(None, parts))
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>\n{css}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return '<div class="verdict">No objectives were given; with <code>--slo</code> this report judges.</div>'
    lines = [
        f'<span class="{"held" if v.held else "missed"}"><strong>{"held" if v.held else "missed"}</strong></span>: '
        f"{escape(v.objective)}, found {escape(v.found)}"
        for v in verdicts
    ]
    missed = "" if all(verdict.held for verdict in verdicts) else " missed"
    return f'<div class="verdict{missed}">{"<br>".join(lines)}</div>'


def _caution(result: Result) -> str:
    words = caution(result)
    return f'<div class="verdict caution"><strong>Caution</strong>: {escape(words)}.</div>' if words else ""


def caution(result: Result) -> str:
    """Why a run says less of the server than it seems to; empty where the generator kept up."""
    if result.unsent:
        return (
            f"the generator was the limit: {result.unsent} of {result.offered} requests were never sent, as all of its "
            "connections were busy for too long; they are not counted as errors of the server"
        )
    if not result.generator_was_the_limit:
        return ""
    return (
        f"the generator was the limit: {_ms(result.generator_added_ms)} ms of the p99 are its own lateness; give it "
        "cores that the server does not use, or another machine"
    )


def _headline(result: Result) -> str:
    latency = result.latency
    figures = [(f"p{p:g}", f"{_percentile(latency, p)} ms") for p in PERCENTILES if latency.resolves(p)]
    figures += [("greatest", f"{_ms(latency.max_ms())} ms"), ("answered", f"{result.answered_per_s:.1f}/s")]
    figures.append(("failed", f"{result.failed_percent:.2f}%"))
    if result.unsent:
        figures.append(("never sent", f"{result.unsent}"))
    return f'<div class="figures">{"".join(f"<div><b>{escape(b)}</b><span>{a}</span></div>" for a, b in figures)}</div>'


def _latency(result: Result) -> list[str]:
    limits = [] if result.good_limit_ms is None else [(result.good_limit_ms, f"{result.good_limit_ms:g} ms")]
    curve = _percentile_curve(result.latency)
    nines = math.ceil(max(x for x, _ in curve))
    ticks = [(0.0, "0"), *((float(n), f"{100 - 10.0 ** (2 - n):g}%") for n in range(1, nines + 1))]
    across = Axis("percentile", 0.0, float(nines), ticks)
    up = Axis.of("ms", [y for _, y in curve], is_log=True)
    over_percentiles = line_chart("Latency over percentiles", across, up, [Series("all", "blue", curve)], limits)
    moments = [(index + 0.5) * result.slice_s for index in range(len(result.slices))]
    lines = [
        Series(
            name,
            colour,
            [(at, part.latency.percentile_ms(p)) for at, part in zip(moments, result.slices, strict=True)],
        )
        for name, colour, p in (("greatest", "grey", 100.0), ("p99", "orange", 99.0), ("p50", "blue", 50.0))
    ]
    up = Axis.of("ms", [y for line in lines for _, y in line.points], is_log=True)
    over_time = line_chart("Latency over time", _time_axis(result), up, lines, limits)
    rows = [
        (name, f"{len(own)}", *(_percentile(own, p) for p in PERCENTILES), _ms(own.max_ms()))
        for name, own in [("all", result.latency), *sorted(result.kinds.items(), key=_by_number)]
    ]
    columns = ("requests", "answered", *(f"p{p:g} ms" for p in PERCENTILES), "greatest ms")
    return [
        "<h2>Latency over percentiles</h2>",
        _figure(
            over_percentiles,
            "From the time a request should have been sent to its whole answer. Each step to the right is a tenth of "
            "the requests that are left.",
        ),
        "<h2>Latency over time</h2>",
        _figure(over_time, f"In slices of {result.slice_s:.2g} s; a request counts where it should have been sent."),
        table(columns, rows),
    ]


def _percentile_curve(latency: Histogram) -> list[tuple[float, float]]:
    """Points (minus the decimal logarithm of the share above, latency in ms) up to the last request."""
    values, counts = latency.distribution()
    whole, passed, points = len(latency), 0, []
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        points.append((-math.log10(1 - passed / whole), value))
        passed += count
    # Two decimals of a nine are as fine as the chart can show.
    thinned = {round(x * _MOST_POINTS / 4): (x, y) for x, y in points}
    return [*thinned.values(), (math.log10(whole) + 0.05, latency.max_ms())]


def _throughput(result: Result) -> str:
    moments = [(index + 0.5) * result.slice_s for index in range(len(result.slices))]

    def line(name: str, colour: str, counts: Sequence[int]) -> Series:
        rates = [count / result.slice_s for count in counts]
        return Series(name, colour, list(zip(moments, rates, strict=True)))

    slices = result.slices
    lines = [
        line("offered", "grey", [part.offered for part in slices]),
        line("answered", "blue", [len(part.latency) for part in slices]),
        line("good", "green", [result.good(part) for part in slices]),
    ]
    up = Axis.of("requests a second", [y for each in lines for _, y in each.points])
    limit = "whatever they took" if result.good_limit_ms is None else f"within {result.good_limit_ms:g} ms"
    caption = (
        f"Offered {result.offered_per_s:.1f}/s, answered {result.answered_per_s:.1f}/s, good {result.good_per_s:.1f}/s "
        f"(answers {limit})."
    )
    chart = line_chart("Throughput over time", _time_axis(result), up, lines)
    return f"<h2>Throughput</h2>\n{_figure(chart, caption)}"


def _stages(result: Result) -> str:
    head = "<h2>Where the time goes</h2>"
    if not result.stages:
        return f"{head}\n<p>The server does not tell the times of its stages.</p>"
    means = [
        (name, colour, own.mean_ms()) for (name, own), colour in zip(result.stages.items(), _STAGE_COLOURS, strict=True)
    ]
    bar = stacked_bar("Mean time of each stage", means)
    rows = [
        (
            f'<span class="key {colour}"></span>{escape(name)}',
            "client" if index < 2 else "server",  # noqa: PLR2004  the client sees the first two
            _ms(own.mean_ms()),
            *(_percentile(own, p) for p in (50.0, 99.0, 99.9)),
        )
        for index, ((name, own), (_, colour, _)) in enumerate(zip(result.stages.items(), means, strict=True))
    ]
    caption = "The mean request, from its intended time on. Percentiles of stages do not add up to those of the whole."
    columns = ("stage", "seen by", "mean ms", "p50 ms", "p99 ms", "p99.9 ms")
    return f"{head}\n{_figure(bar, caption)}\n{table(columns, rows, words=(0, 1), safe=True)}"


def _faults(result: Result) -> str:
    if not result.faults:
        return "<h2>Errors</h2>\n<p>None.</p>"
    rows = [
        (reason, f"{count}", f"{100 * count / result.offered:.2f}%") for reason, count in result.faults.most_common()
    ]
    return f"<h2>Errors</h2>\n{table(('reason', 'requests', 'of all'), rows)}"


def _generator(result: Result) -> str:
    facts = result.generator
    rows = [
        ("sent after the intended time, p50", f"{_ms(facts.lateness.percentile_ms(50))} ms"),
        ("the same, p99", f"{_ms(facts.lateness.percentile_ms(99))} ms"),
        ("what that adds to the p99 of all", f"{_ms(result.generator_added_ms)} ms"),
        (f"sent more than {LATE_S * 1e3:g} ms late", f"{facts.late} of {result.offered}"),
        ("CPU time on a request", f"{facts.cpu_us:.0f} us"),
        ("processes", f"{facts.processes}"),
    ]
    if len(facts.null):
        rows += [
            ("against an empty server at the peak rate, p50", f"{_ms(facts.null.percentile_ms(50))} ms"),
            ("the same, p99", f"{_ms(facts.null.percentile_ms(99))} ms"),
            ("the same, sent late", f"{facts.null_late} of {len(facts.null)}"),
        ]
    return f"<h2>The generator itself</h2>\n{table(('what', 'found'), rows)}"


def _facts(facts: dict[str, str]) -> str:
    shown = {name: value for name, value in facts.items() if name not in {"purpose", "date"}}
    items = [
        f"<dt>{escape(name)}</dt><dd>{f'<code>{escape(value)}</code>' if name == 'command' else escape(value)}</dd>"
        for name, value in shown.items()
    ]
    return f"<h2>What was run</h2>\n<dl>{''.join(items)}</dl>"


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = (0,), *, safe: bool = False
) -> str:
    """A table; columns other than `words` are figures. Cells are escaped unless they are `safe` markup already.

    On a telephone, which has no room for many columns, each row of such a table is a card.
    """
    kinds = ["" if index in words else ' class="number"' for index in range(len(columns))]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(columns, kinds, strict=True))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td{kind} data-head="{escape(name)}">{cell if safe else escape(cell)}</td>'
            for name, cell, kind in zip(columns, row, kinds, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    cards = ' class="cards"' if len(columns) > _MOST_COLUMNS else ""
    return f'<div class="scroll"><table{cards}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(chart: str, caption: str) -> str:
    return f"<figure>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


def _time_axis(result: Result) -> Axis:
    axis = Axis.of("seconds from the start", [result.seconds])
    return Axis(axis.title, 0.0, result.seconds, [tick for tick in axis.ticks if tick[0] <= result.seconds])


def _by_number(item: tuple[str, object]) -> tuple[str, int]:
    """Kinds of a task together and short texts first; a kind that a file names has no length."""
    words = item[0].replace(",", "").split()
    return words[0] if not words[0].isdigit() else "", next((int(word) for word in words if word.isdigit()), 0)


def _percentile(latency: Histogram, percent: float) -> str:
    return _ms(latency.percentile_ms(percent)) if latency.resolves(percent) else "-"


def _ms(value: float) -> str:
    """A time with three digits that count, and never finer than a microsecond."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"  # noqa: PLR2004
