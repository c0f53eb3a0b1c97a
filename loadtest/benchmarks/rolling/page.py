"""The page of the proof, with its plot."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from charts.lines import Series, chart_file
from charts.plot import Axis
from loadtest.benchmarks.rolling.drive import PROTOCOLS
from loadtest.report import machine
from loadtest.report.tables import Table, as_markdown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from loadtest.benchmarks.rolling.drive import Found

_SLICES = 240


def write(found: Found, path: Path, command: str, server: str) -> None:
    """Writes the page, its plots and its figures.

    Args:
        found: What came of it.
        path: Of the page, `.md`; the others lie beside it.
        command: What made it.
        server: What each replica ran, in words.
    """
    for name, picture in plots(found).items():
        path.with_name(f"{path.stem}-{name}.svg").write_text(picture, encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(found.figures(), indent=1) + "\n", encoding="utf-8")
    path.write_text(markdown(found, path.stem, command, server), encoding="utf-8")


def markdown(found: Found, stem: str, command: str, server: str) -> str:
    """The page."""
    wrong = found.verdict()
    offered = sum(found.offered.values())
    says = (
        f"**{offered:,} requests over {len(found.restarts)} restarts: none lost, none reset, no 5xx.**"
        if not wrong
        else "**Not kept:**\n\n" + "\n".join(f"- {line}" for line in wrong)
    )
    method = (
        f"Made by `{command}`. Three replicas (`{server}`) behind HAProxy with `deploy/haproxy/haproxy.cfg`, which asks"
        " `/readyz` once a second and believes the second refusal. Half of the requests come over HTTP keep-alive, half"
        " over gRPC; open loop, Poisson arrivals. One replica after another gets SIGTERM, ends by itself, is started"
        " again and waits until HAProxy takes it back. Everything shares the machine, so a replica that starts takes"
        " its cores from those that answer."
    )
    facts = "\n".join(f"- {name}: {value}" for name, value in machine.facts().items())
    means = (
        "Every request has an id. A client counts a reply only if it bears that id and the answer that its text has"
        " always had; afterwards every id must stand exactly once, as answered, in the replicas' access logs."
    )
    parts = ["# Rolling restarts under load", says, method, facts, means, as_markdown(_counts(found))]
    parts += [as_markdown(_restarts(found)), as_markdown(_latencies(found))]
    parts += [f"![{name}]({stem}-{name}.svg)" for name in plots(found)]
    return "\n\n".join(parts) + "\n"


def _counts(found: Found) -> Table:
    rows = [
        *[[f"requests over {protocol}", f"{found.offered[protocol]:,}"] for protocol in PROTOCOLS],
        ["requests a second", f"{found.rate:.0f}"],
        *([["of a capacity of", f"{found.capacity:.0f}"]] if found.capacity else []),
        ["seconds", f"{found.seconds:.0f}"],
        ["requests failed", f"{sum(found.faults.values()):,}"],
        ["requests not answered exactly once", f"{len(found.unaccounted):,}"],
        *[[f"HAProxy: {name}", f"{count:,}"] for name, count in found.proxy.items()],
    ]
    note = "A request sent again is one for which no connection could be made: nothing of it had been read."
    return Table("What was counted", note, ("", "count"), rows, 1)


def _restarts(found: Found) -> Table:
    rows = []
    ends = [one.ended - one.signalled for one in found.restarts]
    starts = [one.back - one.ended for one in found.restarts]
    for name, values in (
        ("from SIGTERM to the end, s", ends),
        ("from the end until it takes requests again, s", starts),
    ):
        rows.append([name, *(f"{value:.1f}" for value in (min(values), float(np.median(values)), max(values)))])
    codes = ", ".join(str(code) for code in sorted({one.code for one in found.restarts}))
    return Table("The restarts", f"Exit codes: {codes}.", ("", "least", "median", "most"), rows, 1)


def _latencies(found: Found) -> Table:
    disturbed = np.zeros(len(found.times), bool)
    for one in found.restarts:
        disturbed |= (found.times >= one.signalled) & (found.times < one.back)
    rows = []
    for name, chosen in (("while one restarts", disturbed), ("else", ~disturbed)):
        known = found.latencies[chosen & np.isfinite(found.latencies)] * 1e3
        if len(known):
            row = [f"{np.percentile(known, percent):.1f}" for percent in (50, 99, 99.9)]
            rows.append([name, f"{len(known):,}", *row, f"{known.max():.0f}"])
    note = "From the intended time of sending, in milliseconds."
    return Table("Latency", note, ("", "answers", "p50", "p99", "p99.9", "most"), rows, 1)


def plots(found: Found) -> dict[str, str]:
    """Answers a second, and latency, over time; each SIGTERM is marked."""
    count = max(1, min(_SLICES, int(found.seconds)))
    edges = np.linspace(0, found.seconds, count + 1)
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    place = np.clip(np.searchsorted(edges, found.times, "right") - 1, 0, count - 1)
    is_answered = np.isfinite(found.latencies)
    width = found.seconds / count
    offered = np.bincount(place, minlength=count) / width
    answered = np.bincount(place[is_answered], minlength=count) / width
    across = Axis.of("seconds; a dotted line is a SIGTERM", [found.seconds])
    moments = [one.signalled for one in found.restarts]
    rates = [
        Series("offered", "grey", list(zip(middles, offered.tolist(), strict=True))),
        Series("answered", "blue", list(zip(middles, answered.tolist(), strict=True))),
    ]
    tails = [
        Series(f"p{percent}", colour, list(zip(middles, _percentiles(found, place, count, percent), strict=True)))
        for percent, colour in ((50, "blue"), (99, "orange"))
    ]
    return {
        "rate": chart_file("Requests a second", across, _axis("requests/s", rates), rates, (), moments),
        "latency": chart_file("Latency", across, _axis("ms", tails, is_log=True), tails, (), moments),
    }


def _axis(title: str, series: Sequence[Series], *, is_log: bool = False) -> Axis:
    return Axis.of(title, [y for line in series for _, y in line.points], is_log=is_log)


def _percentiles(found: Found, place: NDArray[np.int64], count: int, percent: float) -> list[float]:
    """Of the latencies of each slice, in milliseconds; NaN where there is none."""
    values = []
    for number in range(count):
        known = found.latencies[place == number]
        known = known[np.isfinite(known)]
        values.append(float(np.percentile(known, percent)) * 1e3 if len(known) else float("nan"))
    return values
