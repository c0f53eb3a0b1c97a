"""The measurement as a page that a person reads, with its plots beside it."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from charts.lines import Series, chart_file
from charts.plot import Axis
from loadtest.benchmarks.drive import SLO_MS
from loadtest.benchmarks.runner import Page, Part, Picture
from loadtest.benchmarks.swap.measure import SHARE
from loadtest.report.tables import MET, Table

if TYPE_CHECKING:
    from loadtest.benchmarks.store import Store

_MOST_RATIO = 1.3
_TEXTS = {"mixed": "6 to 250 words", "short": "8 tokens"}


def page(store: Store) -> Page:
    """The page, as far as it has been measured."""
    method = (
        f"Open loop, Poisson arrivals over HTTP at {SHARE:g} of the capacity for a p99 of {SLO_MS:g} ms; the generator"
        " shares the cores with the server. A copy of the model is put into the repository as its next version and"
        " loaded by a call: verified, loaded and warmed in a second engine process, then switched to. A latency counts"
        " from the intended time."
    )
    rounds = _rounds(store)
    pictures = [Picture(name, _plot(of, name)) for name, of in rounds.items()]
    parts: list[Part] = [_table(rounds), *pictures] if rounds else []
    title = "A swap of versions: what requests notice"
    return Page(title, method, parts, facts={"model": store.facts["model"]})


def _rounds(store: Store) -> dict[str, list[dict[str, Any]]]:
    """Of each kind of texts the rounds that have been measured."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, round_ in store.named("round ").items():
        found.setdefault(name.split()[1], []).append(round_)
    return found


def _table(rounds: dict[str, list[dict[str, Any]]]) -> Table:
    rows = []
    for name, of in rounds.items():
        ratio = statistics.median(found["ratio"] for found in of)
        ratios = [found["ratio"] for found in of]
        rows.append(
            [
                _TEXTS[name],
                f"{statistics.median(found['rate'] for found in of):.1f}",
                str(sum(found["swaps"] for found in of)),
                f"{statistics.median(found['swap_s'] for found in of):.2f}",
                str(sum(found["requests_during"] for found in of)),
                *(
                    f"{statistics.median(found[key] for found in of):.1f}"
                    for key in ("before_p50_ms", "during_p50_ms", "before_p99_ms", "during_p99_ms")
                ),
                f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                str(sum(found["without_answer"] for found in of)),
                MET[ratio <= _MOST_RATIO],
            ]
        )
    fewest = min(map(len, rounds.values()))
    note = (
        f"Medians of {fewest} rounds, each a server of its own; the windows of a round's swaps are taken together, and"
        " the calm before them together. During: from the load call until half a second after its reply. Asked: p99"
        f" during a swap at most {_MOST_RATIO:g} times that before it, and an answer for every request."
    )
    head = (
        *("texts", "requests/s", "swaps", "seconds each", "requests during"),
        *(
            "p50 before ms",
            "p50 during ms",
            "p99 before ms",
            "p99 during ms",
            "p99 ratio",
            "without answer",
            "as asked",
        ),
    )
    return Table("Latency before and during a swap", note, head, rows, words=1)


def _plot(rounds: list[dict[str, Any]], name: str) -> str:
    """Latency by the time from the load call: the median of the rounds at each moment."""
    moments: dict[float, list[list[float]]] = {}
    for found in rounds:
        for at, *values in found["curve"]:
            moments.setdefault(at, []).append(values)
    lines = [
        Series(
            title,
            colour,
            [(at, statistics.median(values[index] for values in moments[at])) for at in sorted(moments)],
        )
        for index, (title, colour) in enumerate((("p50", "orange"), ("p99", "blue")))
    ]
    values = [y for line in lines for _, y in line.points]
    low, high = min(moments), max(moments)
    ticks = [(float(tick), f"{tick:g}") for tick in range(round(low), round(high) + 1)]
    across = Axis("seconds from the load call", low, high, ticks)
    swap_s = statistics.median(found["swap_s"] for found in rounds)
    title = f"Latency around a swap, texts of {_TEXTS[name]}; the new version serves after {swap_s:.1f} s"
    return chart_file(title, across, Axis.of("ms", values), lines)
