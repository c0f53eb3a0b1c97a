"""The page of the proof, with its plots."""

from __future__ import annotations

import math
import statistics
from typing import Any

from charts.lines import Series, chart_file
from charts.plot import Axis
from loadtest.benchmarks.rolling.drive import PROTOCOLS
from loadtest.benchmarks.runner import Page, Part, Picture
from loadtest.report.tables import Table

Run = dict[str, Any]
"""What `Found.figures` gives, and the command line of the servers."""


def page(run: Run) -> Page:
    """The page of a run."""
    offered = sum(run["offered"].values())
    verdict = f"**{offered:,} requests over {len(run['restarts'])} restarts: none lost, none reset, no 5xx.**"
    if run["wrong"]:
        verdict = "**Not kept:**\n\n" + "\n".join(f"- {line}" for line in run["wrong"])
    method = (
        f"Three replicas (`{run['server']}`) behind HAProxy with `deploy/haproxy/haproxy.cfg`, which asks"
        " `/readyz` once a second and believes the second refusal. Half of the requests come over HTTP keep-alive, half"
        " over gRPC; open loop, Poisson arrivals. One replica after another gets SIGTERM, ends by itself, is started"
        " again and waits until HAProxy takes it back. Everything shares the machine, so a replica that starts takes"
        " its cores from those that answer."
    )
    means = (
        "Every request has an id. A client counts a reply only if it bears that id and the answer that its text has"
        " always had; afterwards every id must stand exactly once, as answered, in the replicas' access logs."
    )
    pictures = [Picture(name, svg) for name, svg in plots(run).items()]
    parts: list[Part] = [means, _counts(run), _restarts(run), _latencies(run), *pictures]
    return Page("Rolling restarts under load", method, parts, verdict)


def _counts(run: Run) -> Table:
    rows = [
        *[[f"requests over {protocol}", f"{run['offered'][protocol]:,}"] for protocol in PROTOCOLS],
        ["requests a second", f"{run['rate']:.0f}"],
        *([["of a capacity of", f"{run['capacity']:.0f}"]] if run["capacity"] else []),
        ["seconds", f"{run['seconds']:.0f}"],
        ["requests failed", f"{sum(run['faults'].values()):,}"],
        ["requests not answered exactly once", f"{run['unaccounted']:,}"],
        *[[f"HAProxy: {name}", f"{count:,}"] for name, count in run["proxy"].items()],
    ]
    note = "A request sent again is one for which no connection could be made: nothing of it had been read."
    return Table("What was counted", note, ("", "count"), rows, 1)


def _restarts(run: Run) -> Table:
    restarts = run["restarts"]
    spans = {
        "from SIGTERM to the end, s": [restart["ended"] - restart["signalled"] for restart in restarts],
        "from the end until it takes requests again, s": [restart["back"] - restart["ended"] for restart in restarts],
    }
    rows = [
        [name, *(f"{value:.1f}" for value in (min(values), statistics.median(values), max(values)))]
        for name, values in spans.items()
    ]
    codes = ", ".join(str(code) for code in sorted({restart["code"] for restart in restarts}))
    return Table("The restarts", f"Exit codes: {codes}.", ("", "least", "median", "most"), rows, 1)


def _latencies(run: Run) -> Table:
    rows = [
        [name, f"{row['answers']:,}", *(f"{row[p]:.1f}" for p in ("p50", "p99", "p99.9")), f"{row['most']:.0f}"]
        for name, row in run["latencies"].items()
    ]
    note = "From the intended time of sending, in milliseconds."
    return Table("Latency", note, ("", "answers", "p50", "p99", "p99.9", "most"), rows, 1)


def plots(run: Run) -> dict[str, str]:
    """Answers a second, and latency, over time; each SIGTERM is marked."""
    across = Axis.of("seconds; a dotted line is a SIGTERM", [run["seconds"]])
    moments = [restart["signalled"] for restart in run["restarts"]]

    def plot(title: str, up: str, lines: dict[str, tuple[str, str]], *, is_log: bool) -> str:
        series = [
            Series(name, colour, [(row["at_s"], math.nan if row[key] is None else row[key]) for row in run["slices"]])
            for name, (key, colour) in lines.items()
        ]
        axis = Axis.of(up, [y for entry in series for _, y in entry.points], is_log=is_log)
        return chart_file(title, across, axis, series, (), moments)

    rates = {"offered": ("offered_per_s", "grey"), "answered": ("answered_per_s", "blue")}
    tails = {"p50": ("p50_ms", "blue"), "p99": ("p99_ms", "orange")}
    return {
        "rate": plot("Requests a second", "requests/s", rates, is_log=False),
        "latency": plot("Latency", "ms", tails, is_log=True),
    }
