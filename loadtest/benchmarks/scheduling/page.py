"""The comparison as a page that a person reads, with its plots beside it."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from charts.lines import Series, chart_file
from charts.plot import Axis
from loadtest.benchmarks.drive import SLO_MS
from loadtest.benchmarks.runner import Page, Part, Picture
from loadtest.benchmarks.scheduling.steps import BASELINE, OURS
from loadtest.report.tables import MET, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loadtest.benchmarks.store import Store

Steps = dict[str, Any]

_SHORT, _ALL, _ANSWERED = 0.6, 1.1, 0.98
_GOOD = {2.0: 0.95, 5.0: 0.90, 10.0: 0.75}
_TAIL = {2.0: 1.25, 10.0: 2.0}
_REFUSAL_MS, _RECOVERY_S = 20.0, 5.0
_KNEE = 0.9


def page(store: Store) -> Page:
    """The page, as far as it has been measured."""
    method = (
        "Texts of 6 to 250 words of real English in even steps, open loop, Poisson arrivals, over HTTP; the generator"
        " shares the cores with the server. A latency counts from the intended time. The baseline is the same server"
        " with `--scheduling fifo`: the oldest texts first, as many as fit one token budget,"
        " text-embeddings-inference's rule. What the simulator makes of measured runs: [simulated.md](simulated.md)."
    )
    steps = store.steps
    plots = {
        "tails": {"tails": _tails_plot(steps)},
        "goodput": {"goodput": _goodput_plot(steps)},
    }
    sections: Sequence[tuple[Callable[[Steps], Table | None], str]] = (
        (_budget, ""),
        (_capacity, ""),
        (_turns, "tails"),
        (_overload, "goodput"),
        (_knee, ""),
    )
    parts: list[Part] = []
    for section, kind in sections:
        if (table := section(steps)) is not None:
            parts += [table, *(Picture(name, svg) for name, svg in plots.get(kind, {}).items() if svg)]
    facts = {"model": f"{store.facts['model']} version {store.facts['version']}"}
    title = "Scheduling: batches against deadlines, beside first come, first served"
    return Page(title, method, parts, facts=facts)


def _named(steps: Steps, prefix: str) -> list[tuple[list[str], Any]]:
    """Steps of a kind: the words behind the prefix, and what was found."""
    return [(name.removeprefix(prefix).split(), found) for name, found in steps.items() if name.startswith(prefix)]


def _ms(found: dict[str, float], name: str) -> str:
    return f"{found[name]:.1f}" if found.get(name) is not None else "-"


def _budget(steps: Steps) -> Table | None:
    if "budget" not in steps:
        return None
    found = steps["budget"]
    rows = [
        [budget, _ms(run, "p50_ms"), _ms(run, "p99_ms"), f"{run['answered_per_s']:.1f}"]
        for budget, run in found["tried"].items()
    ]
    note = f"At {found['rate']:.0f} requests a second; the baseline has the one with the best p99, {found['best']}."
    return Table("The baseline's budget", note, ("padded tokens", "p50 ms", "p99 ms", "answered/s"), rows)


def _capacity(steps: Steps) -> Table | None:
    rows = [
        [" ".join(words), f"{found['capacity_per_s'] or 0:.1f}", found["confidence"]]
        for words, found in _named(steps, "capacity ")
    ]
    note = (
        f"The highest rate at which p99 <= {SLO_MS:g} ms; a request without an answer counts as one that took for ever."
    )
    return Table("Capacity", note, ("of", "requests/s", "how sure"), rows, words=1) if rows else None


def _turns(steps: Steps) -> Table | None:
    runs: dict[str, list[Any]] = {}
    for (_, subject), found in _named(steps, "turn "):
        runs.setdefault(subject, []).append(found)
    if runs.keys() < {OURS, BASELINE}:
        return None
    columns = (
        ("short_p99_ms", _SHORT),
        ("p99_ms", _ALL),
        ("long_p99_ms", None),
        ("p50_ms", None),
        ("answered_per_s", None),
    )
    medians = {
        subject: {n: statistics.median(run[n] for run in of) for n, _ in columns} for subject, of in runs.items()
    }
    ratios = {n: medians[OURS][n] / medians[BASELINE][n] for n, _ in columns}
    rows = [[subject, *(f"{medians[subject][n]:.1f}" for n, _ in columns)] for subject in (OURS, BASELINE)]
    rows.append(["ratio", *(f"{ratios[n]:.2f}" for n, _ in columns)])
    met = [MET[ratios[n] <= limit] if limit else "" for n, limit in columns[:-1]]
    rows.append(["as asked", *met, MET[ratios["answered_per_s"] >= _ANSWERED]])
    note = (
        f"In turns, medians of {min(map(len, runs.values()))}. Asked: p99 of the shortest third at most {_SHORT:g}"
        f" times the baseline's, of all at most {_ALL:g} times, throughput not lower (by more than 2%)."
    )
    head = ("at 0.8 C", "short p99 ms", "p99 ms", "long p99 ms", "p50 ms", "answered/s")
    return Table("Short texts beside long ones", note, head, rows, words=1)


def _overload(steps: Steps) -> Table | None:
    found = _named(steps, "overload ")
    if not found or f"capacity {OURS}" not in steps:
        return None
    own = float(steps[f"capacity {OURS}"]["capacity_per_s"])
    rows = []
    for (factor, subject), run in sorted(found, key=lambda step: (float(step[0][0]), step[0][1] != OURS)):
        asked = _asked_of(float(factor), run, own) if subject == OURS else ""
        figures = (_ms(run, name) for name in ("p99_ms", "refusal_p99_ms"))
        good = f"{run['good_per_s']:.1f}"
        share = f"{100 * run['good_per_s'] / own:.0f}%"
        lost = (f"{run[name]:.1f}" for name in ("refused_per_s", "missed_per_s"))
        back = f"{run['bad_until_s']:.1f}"
        rows.append([factor, subject, f"{run['rate']:.0f}", good, share, *lost, *figures, back, asked])
    note = (
        f"Multiples of our own capacity ({own:.1f}/s), with a deadline of {SLO_MS:g} ms for everybody; then half of it."
        " Good: answered within the deadline; refused: on arrival; missed: taken, and dropped at the deadline."
        " Back after: seconds until the last request that had no good answer."
        " Asked: goodput of 95, 90 and 75% at 2, 5 and 10 times, p99 at most 1.25 times the deadline at 2 times and"
        " twice at 10, refusals within 20 ms at 2 times, back within 5 s."
    )
    head = (
        "times",
        "who",
        "offered/s",
        "good/s",
        "of capacity",
        "refused/s",
        "missed/s",
        "p99 ms",
        "refusal p99 ms",
        "back after s",
        "as asked",
    )
    return Table("Overload", note, head, rows, words=2)


def _asked_of(factor: float, run: dict[str, float], own: float) -> str:
    if factor not in _GOOD:
        return ""
    kept = run["good_per_s"] >= _GOOD[factor] * own and run["bad_until_s"] <= _RECOVERY_S
    kept = kept and run.get("p99_ms", 0.0) <= _TAIL.get(factor, float("inf")) * SLO_MS
    return MET[kept and (factor > min(_GOOD) or run.get("refusal_p99_ms", 0.0) <= _REFUSAL_MS)]


def _knee(steps: Steps) -> Table | None:
    found = _named(steps, "knee ")
    if not found:
        return None
    rows = [
        [factor, *(f"{run[n]:.0f}" for n in ("rate", "good_per_s", "refused_per_s")), _ms(run, "p99_ms")]
        for (factor,), run in found
    ]
    held = [run["rate"] for _, run in found if run["good_per_s"] >= _KNEE * run["offered_per_s"]]
    knee = f"the last rate with nine of ten requests in time is {max(held):.0f}/s" if held else "none kept nine of ten"
    note = (
        "Multiples of the capacity for texts of 8 tokens. Here receiving and refusing costs as much as computing, on"
        f" the same cores: {knee}."
    )
    return Table("Texts of 8 tokens", note, ("times", "offered/s", "good/s", "refused/s", "p99 ms"), rows)


def _tails_plot(steps: Steps) -> str:
    runs = sorted(((subject, found) for (_, subject), found in _named(steps, "share ")), key=lambda run: run[1]["rate"])
    lines = [
        Series(
            f"{subject}, {name}",
            colour,
            [(found["rate"], found[key]) for who, found in runs if who == subject and key in found],
        )
        for subject, name, key, colour in (
            (OURS, "short third", "short_p99_ms", "blue"),
            (OURS, "long third", "long_p99_ms", "violet"),
            (BASELINE, "short third", "short_p99_ms", "orange"),
            (BASELINE, "long third", "long_p99_ms", "grey"),
        )
    ]
    return _plot("p99 of short and of long texts", "p99, ms", lines, log_up=True, limits=[(SLO_MS, f"{SLO_MS:g} ms")])


def _goodput_plot(steps: Steps) -> str:
    runs = sorted(
        ((subject, found) for (_, subject), found in _named(steps, "overload ")), key=lambda run: run[1]["rate"]
    )
    lines = [
        Series(subject, colour, [(found["rate"], found["good_per_s"]) for who, found in runs if who == subject])
        for subject, colour in ((OURS, "blue"), (BASELINE, "orange"))
    ]
    return _plot(f"Goodput: answers within {SLO_MS:g} ms", "good answers a second", lines, log_across=True)


def _plot(
    title: str,
    up: str,
    lines: Sequence[Series],
    *,
    log_across: bool = False,
    log_up: bool = False,
    limits: Sequence[tuple[float, str]] = (),
) -> str:
    """A chart over offered load; empty where a line has nothing."""
    if not lines or any(not line.points for line in lines):
        return ""
    points = [point for line in lines for point in (*line.points, *line.dots)]
    across = Axis.of("offered requests a second", [x for x, _ in points], is_log=log_across)
    return chart_file(title, across, Axis.of(up, [y for _, y in points], is_log=log_up), lines, limits)
