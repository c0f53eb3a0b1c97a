"""The measurement as a page that a person reads."""

from __future__ import annotations

from typing import Any

from loadtest.benchmarks.hostile.attacks import BYTES_PER_S, CONNECTIONS, MANY_CONNECTIONS
from loadtest.benchmarks.hostile.measure import LEFT_MB, MOST_MB
from loadtest.benchmarks.hostile.polite import WIRES
from loadtest.benchmarks.runner import Page
from loadtest.benchmarks.store import Store
from loadtest.report.tables import MET, Table

MOST_P99_MS, MOST_RATIO = 250.0, 3.0


def page(store: Store) -> Page:
    """The page, as far as it has been measured."""
    method = (
        f"Each attack has a fresh server with the fake engine and default limits, {CONNECTIONS} connections"
        f" ({MANY_CONNECTIONS} of half-sent messages, 1,200 of idle ones) and at most {BYTES_PER_S / 1e6:g} MB/s on"
        f" each of them, for {store.facts['seconds']:g} s, from the same cores. An attacker whose connection is ended"
        " opens the next one. Beside it the polite client asks for an embedding 100 times a second over one connection"
        " of HTTP (`/embed`) and as often over one of gRPC (`ModelInfer`); a latency counts from the time at which the"
        " request was due. The control is the bytes a second that the attack sent, as good cheap calls of 8"
        " connections, as far as the server takes them."
    )
    rows = store.steps
    parts = [_latencies(rows), _memory(rows), *_former(store)]
    return Page("Hostile clients", method, parts)


def _former(store: Store) -> list[Table]:
    """Beside what the same attacks did to the server before it had the bounds, where that was measured."""
    path = store.path.with_name(f"{store.path.stem}-before.json")
    if not path.exists():
        return []
    former = Store.read(path).steps
    cells = []
    for name, found in store.steps.items():
        if name in former:
            work = [_worst(step["polite"]["during"], "work_p99_ms") for step in (former[name], found)]
            grown = [
                step["memory_mb"][when] - step["memory_mb"]["before"]
                for when in ("most", "after")
                for step in (former[name], found)
            ]
            cells.append([name, *(f"{figure:.0f}" for figure in work), *(f"{figure:+.0f}" for figure in grown)])
    note = (
        "The same attacks on the server as it was before it had these bounds, and now. Work is the CPU time that the"
        " server spends while a request of the polite client waits, p99 of the worse wire: unlike a latency it does not"
        f" depend on what else the machine does, so that runs can be compared. `{path.name}` has the figures."
    )
    head = ("attack", "work ms before", "now", "most MB before", "now", "MB left before", "now")
    return [Table("Before and now", note, head, cells, words=1)]


def _worst(figures: dict[str, dict[str, float]], name: str) -> float:
    return max(figures[wire][name] for wire in WIRES)


def _pair(figures: dict[str, dict[str, float]], name: str) -> str:
    return " / ".join(f"{figures[wire][name]:.1f}" for wire in WIRES)


def _latencies(rows: dict[str, Any]) -> Table:
    cells = []
    for name, found in rows.items():
        polite = found["polite"]
        during = _worst(polite["during"], "p99_ms")
        control = _worst(polite["control"], "p99_ms") if "control" in polite else None
        is_met = during <= MOST_P99_MS and not found["faults"]
        if control is not None:
            is_met = is_met and during <= MOST_RATIO * control
        cells.append(
            [
                name,
                f"{found['attack']['bytes_per_s'] / 1e6:.2f}",
                *(_pair(polite[when], "p50_ms") for when in ("before", "during", "after")),
                *(_pair(polite[when], "p99_ms") for when in ("before", "during", "after")),
                "-" if control is None else _pair(polite["control"], "p99_ms"),
                "-" if control is None else f"{during / control:.2f}",
                str(len(found["faults"])),
                MET[is_met],
            ]
        )
    note = (
        "HTTP / gRPC, milliseconds. Asked: no request of the polite client fails, p99 during the attack at most"
        f" {MOST_P99_MS:g} ms and, where the attack aims at the event loop, at most {MOST_RATIO:g} times that of the"
        " control (the worse wire of each)."
    )
    head = (
        *("attack", "MB/s", "p50 before", "p50 during", "p50 after"),
        *("p99 before", "p99 during", "p99 after", "p99 control", "during/control", "failed", "as asked"),
    )
    return Table("The polite client", note, head, cells, words=1)


def _memory(rows: dict[str, Any]) -> Table:
    cells = []
    for name, found in rows.items():
        memory, descriptors = found["memory_mb"], found["descriptors"]
        most, left = (memory[when] - memory["before"] for when in ("most", "after"))
        cells.append(
            [
                name,
                f"{found['attack']['connections']:.0f}",
                f"{memory['before']:.0f}",
                *(f"{figure:+.0f}" for figure in (most, left)),
                *(str(descriptors[when]) for when in ("before", "most", "after")),
                f"{found['settled_s']:.1f}",
                str(found["log_lines"]),
                MET[most <= MOST_MB and left <= LEFT_MB],
            ]
        )
    note = (
        "Of the server process. After: once no more than 20 MB above the start are resident and the descriptors are"
        f" back, or after a minute. Asked: at most {MOST_MB:g} MB above the start during the attack and"
        f" {LEFT_MB:g} MB after it."
    )
    head = (
        *("attack", "connections made", "MB before", "most MB", "MB after"),
        *("descriptors before", "most", "after", "seconds until back", "log lines", "as asked"),
    )
    return Table("Memory, descriptors, log", note, head, cells, words=1)
