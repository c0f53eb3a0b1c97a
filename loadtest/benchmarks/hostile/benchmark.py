"""Attacks one after another, each on a server of its own, beside a polite client."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.hostile.attacks import ATTACKS, BYTES_PER_S, CONNECTIONS, MANY_CONNECTIONS
from loadtest.benchmarks.hostile.measure import LEFT_MB, MAX_MB, Plan, trial
from loadtest.benchmarks.hostile.polite import WIRES, Polite
from loadtest.benchmarks.hostile.victim import Victim
from loadtest.benchmarks.runner import Benchmark, Page
from loadtest.benchmarks.server_process import BertServer, few_descriptors
from loadtest.benchmarks.show import table
from loadtest.benchmarks.store import Store
from loadtest.generator.child import Child
from loadtest.report.tables import MET
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from export.pages.tables import Table
    from loadtest.benchmarks.store import Step

PER_S = 100.0
"""Requests per second of the polite client over each wire."""

MAX_P99_MS, MAX_RATIO = 250.0, 3.0
_BEFORE_S, _CONTROL_S, _SETTLE_S = 1.5, 2.0, 60.0

Found = tuple[str, dict[str, Any]]
"""An attack's name and the result of `trial`."""


class HostileBenchmark(Benchmark):
    """Needs the fake engine alone."""

    name = "hostile"
    purpose = "what attacks cost a polite client, in latency and memory"
    rounds = 1
    seconds = 4.0

    def steps(self) -> Iterator[Step]:
        attacker = self.stack.enter_context(Child("loadtest.benchmarks.hostile.attacker"))
        for name in ATTACKS:
            yield name, partial(self._attack, attacker, name)

    def _attack(self, attacker: Child, name: str) -> dict[str, Any]:
        options = ("--engine", "fake", "--default-timeout-ms", "10000")
        server = BertServer(self.options.models, self.options.precision, available_cpus(), *options)
        with few_descriptors(), server:
            victim = Victim(server.pids()[0], {"http": server.http_port, "grpc": server.grpc_port}, server.log_lines)
            with Polite(victim, self.bundle.model, PER_S) as polite:
                return trial(
                    victim, polite, attacker, name, Plan(_BEFORE_S, self.options.seconds, _CONTROL_S, _SETTLE_S)
                )

    def page(self, store: Store) -> Page:
        method = (
            f"Each attack runs for {store.facts['seconds']:g} s against a new server with the fake engine and default"
            f" limits. It uses {CONNECTIONS} connections ({MANY_CONNECTIONS} for half-sent messages, 1,200 for idle"
            f" ones) with at most {BYTES_PER_S / 1e6:g} MB/s each, and reopens closed ones. The polite client sends 100"
            " requests/s over HTTP (`/embed`) and 100 over gRPC (`ModelInfer`), with one connection each. Latency"
            " counts from the scheduled time. The control sends good cheap calls on 8 connections at the attack's bytes"
            " per second, as far as the server accepts them. All share the same cores."
        )
        return Page("Hostile clients", _answer(store), method, [_latencies(store), _memory(store), *_former(store)])

    def failed(self, store: Store) -> bool:
        return not store.steps or any(step["faults"] for step in store.steps.values())


def _worst(figures: dict[str, dict[str, float]], name: str) -> float:
    return max(figures[wire][name] for wire in WIRES)


def _answer(store: Store) -> str:
    steps = store.steps.values()
    failed = sum(len(step["faults"]) for step in steps) or "No"
    p99_ms = max(_worst(step["polite"]["during"], "p99_ms") for step in steps)
    most, left = (max(_grown(step, when) for step in steps) for when in ("most", "after"))
    return (
        f"**How do {len(steps)} attacks affect a polite client, memory and descriptors?** {failed} polite request"
        f" fails, and p99 stays within {math.ceil(p99_ms)} ms. Memory grows by at most {most:.0f} MB during an attack,"
        f" and at most {left:.0f} MB remain."
    )


def _latencies(store: Store) -> Table:
    def pair(when: str, name: str) -> Callable[[Found], str]:
        def cell(row: Found) -> str:
            figures = row[1]["polite"].get(when)
            return " / ".join(f"{figures[wire][name]:.1f}" for wire in WIRES) if figures else "-"

        return cell

    def over_control(row: Found) -> float | None:
        polite = row[1]["polite"]
        during = _worst(polite["during"], "p99_ms")
        return during / _worst(polite["control"], "p99_ms") if "control" in polite else None

    def is_met(row: Found) -> bool:
        during = _worst(row[1]["polite"]["during"], "p99_ms")
        return during <= MAX_P99_MS and not row[1]["faults"] and (over_control(row) or 0.0) <= MAX_RATIO

    note = (
        "HTTP / gRPC in milliseconds. Asked: no failed request, and p99 during the attack at most"
        f" {MAX_P99_MS:g} ms. For attacks on the event loop, p99 is at most {MAX_RATIO:g} times the control's (worse"
        " wire of each)."
    )
    return table(
        "The polite client",
        note,
        store.steps.items(),
        ("attack", lambda row: row[0]),
        ("MB/s", lambda row: f"{row[1]['attack']['bytes_per_s'] / 1e6:.2f}"),
        *((f"{p} {when}", pair(when, f"{p}_ms")) for p in ("p50", "p99") for when in ("before", "during", "after")),
        ("p99 control", pair("control", "p99_ms")),
        ("during/control", lambda row: "-" if (ratio := over_control(row)) is None else f"{ratio:.2f}"),
        ("failed", lambda row: len(row[1]["faults"])),
        ("as asked", lambda row: MET[is_met(row)]),
        words=1,
    )


def _grown(step: dict[str, Any], when: str) -> float:
    return float(step["memory_mb"][when] - step["memory_mb"]["before"])


def _memory(store: Store) -> Table:
    note = (
        "Figures of the server process. `after`: when resident memory is within 20 MB of the start and descriptors are"
        f" back, at most a minute later. Asked: at most {MAX_MB:g} MB above the start during the attack, {LEFT_MB:g} MB"
        " after it."
    )
    return table(
        "Memory, descriptors, log",
        note,
        store.steps.items(),
        ("attack", lambda row: row[0]),
        ("connections made", lambda row: f"{row[1]['attack']['connections']:.0f}"),
        ("MB before", lambda row: f"{row[1]['memory_mb']['before']:.0f}"),
        ("most MB", lambda row: f"{_grown(row[1], 'most'):+.0f}"),
        ("MB after", lambda row: f"{_grown(row[1], 'after'):+.0f}"),
        ("descriptors before", lambda row: row[1]["descriptors"]["before"]),
        ("most", lambda row: row[1]["descriptors"]["most"]),
        ("after", lambda row: row[1]["descriptors"]["after"]),
        ("seconds until back", lambda row: f"{row[1]['settled_s']:.1f}"),
        ("log lines", lambda row: row[1]["log_lines"]),
        ("as asked", lambda row: MET[_grown(row[1], "most") <= MAX_MB and _grown(row[1], "after") <= LEFT_MB]),
        words=1,
    )


def _former(store: Store) -> list[Table]:
    """The same attacks on the server before it had the bounds, if they were measured."""
    path = store.path.with_name(f"{store.path.stem}-before.json")
    if not path.exists():
        return []
    former = Store.read(path).steps
    rows = [(name, former[name], found) for name, found in store.steps.items() if name in former]
    note = (
        "The same attacks before the server had these bounds, and now. `work`: CPU time that the server spends while a"
        " polite request waits, p99 of the worse wire. Unlike latency, it does not depend on other load, so runs are"
        f" comparable. Figures: `{path.name}`."
    )
    columns = (
        ("attack", lambda row: row[0]),
        ("work ms before", lambda row: f"{_worst(row[1]['polite']['during'], 'work_p99_ms'):.0f}"),
        ("now", lambda row: f"{_worst(row[2]['polite']['during'], 'work_p99_ms'):.0f}"),
        ("most MB before", lambda row: f"{_grown(row[1], 'most'):+.0f}"),
        ("now", lambda row: f"{_grown(row[2], 'most'):+.0f}"),
        ("MB left before", lambda row: f"{_grown(row[1], 'after'):+.0f}"),
        ("now", lambda row: f"{_grown(row[2], 'after'):+.0f}"),
    )
    return [table("Before and now", note, rows, *columns, words=1)]
