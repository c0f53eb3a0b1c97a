"""Measured runs and the simulation of the very same requests, side by side and stage by stage."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.drive import SLO_MS, drive, even
from loadtest.benchmarks.runner import Benchmark, Page
from loadtest.benchmarks.scheduling import simulated
from loadtest.benchmarks.scheduling.steps import OURS, Bench, Plan, capacity_of, costs_of
from loadtest.report.tables import MET, Table
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadtest.benchmarks.drive import Requests
    from loadtest.benchmarks.store import Step, Store

SHARES = (0.3, 0.6, 0.8)
"""Of the capacity that is found first."""

_USUAL = Plan(seconds=30.0)
_SETTLED_S = 15.0
_REPLY_US, _BATCH_US = 100.0, 70.0
"""Of what the server adds, the parts behind the engine's work: by the CPU time of docs/benchmarks/main-job.md."""

_NEAR = 0.15
_SIMULATED = ("answered_per_s", "p50_ms", "p99_ms", "short_p99_ms", "queue_ms", "compute_ms")


class SimulatedBenchmark(Benchmark):
    """Whether the simulation tells the truth."""

    name = "simulated"
    purpose = "measured runs beside the simulation of the same requests"
    rounds = _USUAL.rounds
    seconds = _USUAL.seconds
    probe_s = _USUAL.probe_s

    @property
    def _plan(self) -> Plan:
        return Plan(self.options.rounds, self.options.seconds, probe_s=self.options.probe_s)

    def facts(self) -> dict[str, Any]:
        return {**self.model_facts(), "plan": asdict(self._plan)}

    def steps(self) -> Iterator[Step]:
        bench = Bench.over(self.bundle, available_cpus(), self.store, self._plan, self.stack)
        yield f"capacity {OURS}", partial(capacity_of, bench, OURS, bench.mixed)
        yield "calm", partial(_calm, bench)
        for number, share in product(range(1, bench.plan.rounds + 1), SHARES):
            yield f"replay {number} {share:g}", partial(_replayed, bench, share, number)

    def page(self, store: Store) -> Page:
        return page(store)


def _calm(bench: Bench) -> dict[str, Any]:
    """What the server adds to a request that meets no other, as options of the simulator; and its table of costs."""
    server, rate = bench.server(OURS), min(SHARES) * bench.capacity(OURS)
    requests, _ = drive(bench.target(server), bench.mixed, even(bench.plan.seconds), rate, 70)
    each_us, token_us = requests.overhead_us()
    costs = costs_of(bench.status(server))
    held_us = costs["corrections"]["wide"]["overhead_us"]
    wire_us = max(0.0, held_us - _BATCH_US)
    receive_us = max(0.0, each_us - wire_us - _BATCH_US - _REPLY_US)
    added = {"receive": receive_us, "token": token_us, "reply": _REPLY_US, "batch": _BATCH_US, "wire": wire_us}
    table = [[row[name] for name in ("kind", "tokens", "texts", "measured_us", "spread_us")] for row in costs["table"]]
    return {"overhead": added, "table": table}


def _replayed(bench: Bench, share: float, number: int) -> dict[str, Any]:
    """A measured run, and its simulation with what the server has learned of its costs under the same load."""
    rate, seconds, phases = share * bench.capacity(OURS), bench.plan.seconds, even(bench.plan.seconds)
    server, overhead = bench.server(OURS), bench.store.steps["calm"]["overhead"]
    target = bench.target(server)
    # Its corrections are those of this load only after some of it.
    drive(target, bench.mixed, even(_SETTLED_S), rate, 1000 + number)
    requests, generator = drive(target, bench.mixed, phases, rate, 100 + number)
    measured = requests.figures(seconds, SLO_MS) | _stages(requests)
    measured["generator_late_p99_ms"] = generator.lateness.percentile_ms(99)
    # What batches cost is given, by the run itself: the host's speed differs from one run to the next.
    status = bench.status(server)
    told = simulated.replay(status, bench.mixed.requests(phases, rate, 100 + number), seconds, overhead)
    figures = {name: told[name] for name in _SIMULATED}
    learned = costs_of(status)["corrections"]
    return {"measured": measured, "simulated": figures, "corrections": learned}


def _stages(requests: Requests) -> dict[str, float]:
    """Means of what the server says of its stages."""
    told = requests.answered & (requests.compute_us >= 0)
    return {f"{name}_ms": float(getattr(requests, f"{name}_us")[told].mean() / 1e3) for name in ("queue", "compute")}


def page(store: Store) -> Page:
    """The page, as far as it has been measured."""
    method = (
        "Texts of 6 to 250 words of real English in even steps, open loop, Poisson arrivals, over HTTP; the generator"
        " shares the cores with the server. The very arrivals and lengths of each measured run are replayed by"
        " `bertserve simulate`, with the server's table and what `/status` says at the end of the run: how far batches"
        " were off lately, how much they varied, and how long that lasts. So what batches cost is given, and what"
        " the simulator makes of it is compared."
    )
    facts = {"model": f"{store.facts['model']} version {store.facts['version']}"}
    found = [(share, runs) for share in SHARES if (runs := _runs(store, share))]
    parts = [_figures(store, found), _means(found)] if found else []
    return Page("Simulated against measured", method, parts, facts=facts)


def _runs(store: Store, share: float) -> list[Any]:
    return [run for name, run in store.named("replay ").items() if float(name.split()[1]) == share]


def _off(runs: Sequence[Any], name: str) -> float:
    """How far the simulation is from the measurement, relative: the median of the runs."""
    return float(statistics.median(run["simulated"][name] / run["measured"][name] for run in runs) - 1)


def _median(runs: Sequence[Any], who: str, name: str) -> float:
    return float(statistics.median(run[who][name] for run in runs))


def _figures(store: Store, found: Sequence[tuple[float, Sequence[Any]]]) -> Table:
    names = ("p50_ms", "p99_ms", "answered_per_s")
    rows = []
    for share, runs in found:
        row = [f"{share:g}"]
        for name in names:
            row += [f"{_median(runs, who, name):.1f}" for who in ("measured", "simulated")]
            row.append(f"{100 * _off(runs, name):+.0f}%")
        rows.append([*row, MET[all(abs(_off(runs, name)) <= _NEAR for name in names)]])
    head = [word for name in ("p50 ms", "p99 ms", "answered/s") for word in (f"{name} measured", "simulated", "off")]
    calm, capacity = store.steps["calm"]["overhead"], store.steps[f"capacity {OURS}"]["capacity_per_s"]
    note = (
        f"C is {capacity:.1f} requests a second, the highest rate at which p99 <= {SLO_MS:g} ms. Medians of"
        f" {len(found[0][1])} runs, `off` of the ratios within a run. What the server adds was measured at"
        f" {min(SHARES):g} C: {calm['receive']:.0f} us a request to receive, {calm['token']:.1f} us a token,"
        f" {calm['reply']:.0f} us an answer, {calm['batch']:.0f} us a batch, {calm['wire']:.0f} us until an idle lane"
        " begins. Asked: all within 15%."
    )
    return Table("Latency and throughput", note, ("of C", *head, "as asked"), rows)


def _means(found: Sequence[tuple[float, Sequence[Any]]]) -> Table:
    names = ("queue_ms", "compute_ms")
    rows = [
        [f"{share:g}", *(f"{_median(runs, who, name):.1f}" for name in names for who in ("measured", "simulated"))]
        for share, runs in found
    ]
    note = "Means, as the server's headers tell them: the wait for a lane, and the time of the engine. Medians of runs."
    head = ("of C", "queue ms measured", "simulated", "compute ms measured", "simulated")
    return Table("Stages", note, head, rows)
