"""The steps of the comparison, in order; each needs what the ones before it found.

Subjects are our server, ours with first come, first served (the baseline), and both with the objective as the
default deadline, for overload: only who knows when an answer becomes useless can refuse in time.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import statistics
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.drive import SLO_MS, Workload, drive, even, find_capacity, mixed_texts, short_texts
from loadtest.benchmarks.server_process import HOST, BertServer
from loadtest.generator.messages import Target
from loadtest.generator.scenario import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from loadtest.benchmarks.store import Store
    from loadtest.generator.workload import Bundle

OURS, BASELINE = "ours", "baseline"
SHARES = (0.3, 0.5, 0.65, 0.8, 0.9, 1.0, 1.15)
OVERLOADS = (0.5, 1.0, 1.5, 2.0, 5.0, 10.0)
KNEE = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
BUDGETS = (256, 512, 1024, 2048)

_LOAD_AFTER, _AFTER_S = 0.5, 10.0
_WARM_SHARE, _WARM_S = 0.5, 3.0


@dataclass(slots=True, frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        rounds: Of what is measured in turns.
        seconds: Of an even run.
        overload_s: Of an overload.
        probe_s: Of a run of a search for capacity.
    """

    rounds: int = 5
    seconds: float = 30.0
    overload_s: float = 60.0
    probe_s: float = 15.0


@dataclass(slots=True)
class Bench:
    """Servers, texts and what was found.

    Attributes:
        bundle: What is served.
        threads: Cores of the engine.
        store: What was found.
        plan: How much is measured.
        mixed: Texts of 6 to 250 words.
        short: Texts of 8 tokens.
        stack: Ends the servers.
        servers: Those that are up, by their options.
    """

    bundle: Bundle
    threads: int
    store: Store
    plan: Plan
    mixed: Workload
    short: Workload
    stack: contextlib.ExitStack
    servers: dict[tuple[str, ...], BertServer] = field(default_factory=dict)

    @classmethod
    def over(cls, bundle: Bundle, threads: int, store: Store, plan: Plan, stack: contextlib.ExitStack) -> Bench:
        """Makes the texts; servers start when they are asked for."""
        return cls(bundle, threads, store, plan, mixed_texts(bundle), short_texts(bundle), stack)

    def server(self, subject: str, *, deadline: bool = False, budget: int | None = None) -> BertServer:
        """A subject's server, started and warm."""
        options: tuple[str, ...] = ()
        if subject == BASELINE:
            budget = budget or self.store.steps["budget"]["best"]
            options = ("--scheduling", "fifo", "--max-batch-tokens", str(budget))
        if deadline:
            options += ("--default-timeout-ms", f"{SLO_MS:.0f}")
        if options not in self.servers:
            repository = self.bundle.path.parents[1]
            server = BertServer(repository, self.bundle.precision, self.threads, *options)
            self.servers[options] = self.stack.enter_context(server)
        return self.servers[options]

    def target(self, server: BertServer) -> Target:
        """Where its requests go."""
        return Target("http", HOST, server.http_port, self.bundle.model)

    def guess(self) -> float:
        """Requests of the mixed texts a second that a device does one by one, by the server's own table."""
        rows = [
            row
            for row in costs_of(self.status(self.server(OURS)))["table"]
            if row["kind"] == "wide" and row["texts"] == 1
        ]
        times = [min(rows, key=lambda row: abs(row["tokens"] - tokens)) for tokens in self.mixed.tokens]
        each = [
            row["measured_us"] * tokens / row["tokens"] for row, tokens in zip(times, self.mixed.tokens, strict=True)
        ]
        return 1e6 / statistics.fmean(each)

    def status(self, server: BertServer) -> Any:  # noqa: ANN401  JSON
        """What it says of itself."""
        connection = http.client.HTTPConnection(HOST, server.http_port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/status")
            return json.loads(connection.getresponse().read())

    def capacity(self, subject: str, workload: Workload | None = None) -> float:
        """What was found of it."""
        name = "capacity of short texts" if workload is self.short else f"capacity {subject}"
        return float(self.store.steps[name]["capacity_per_s"])


def costs_of(status: Any) -> Any:  # noqa: ANN401  JSON
    """Those of the only model that has any."""
    [model] = [model for model in status["models"] if model["costs"]]
    return model["costs"]


def steps(bench: Bench) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The names of all steps and what finds each of them, in order."""
    yield "budget", partial(_budget, bench)
    for subject in (OURS, BASELINE):
        yield f"capacity {subject}", partial(capacity_of, bench, subject, bench.mixed)
    yield "capacity of short texts", partial(capacity_of, bench, OURS, bench.short)
    yield from _rounds(bench)
    for share, subject in itertools.product(SHARES, (OURS, BASELINE)):
        yield f"share {share:g} {subject}", partial(_at_share, bench, subject, share, bench.plan.probe_s, 50)
    for factor, subject in itertools.product(OVERLOADS, (OURS, BASELINE)):
        yield f"overload {factor:g} {subject}", partial(_overload, bench, subject, factor)
    for factor in KNEE:
        yield f"knee {factor:g}", partial(_knee, bench, factor)


def _rounds(bench: Bench) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is measured several times: who goes first changes."""
    plan = bench.plan
    for number in range(1, plan.rounds + 1):
        for subject in (OURS, BASELINE) if number % 2 else (BASELINE, OURS):
            yield f"turn {number} {subject}", partial(_at_share, bench, subject, 0.8, plan.seconds, number)


def _budget(bench: Bench) -> dict[str, Any]:
    """The budget with which the baseline has its best p99, at three quarters of what one by one would carry."""
    rate = 0.75 * bench.guess()
    tried = {}
    for budget in BUDGETS:
        with contextlib.ExitStack() as stack:
            options = ("--scheduling", "fifo", "--max-batch-tokens", str(budget))
            repository = bench.bundle.path.parents[1]
            server = stack.enter_context(BertServer(repository, bench.bundle.precision, bench.threads, *options))
            tried[str(budget)] = _run(bench, server, bench.mixed, even(bench.plan.probe_s), rate, 1)
    best = min(tried, key=lambda budget: tried[budget].get("p99_ms", float("inf")))
    return {"rate": rate, "tried": tried, "best": int(best)}


def _run(
    bench: Bench, server: BertServer, workload: Workload, phases: tuple[Phase, ...], rate: float, seed: int
) -> dict[str, float]:
    """The figures of the first phase, on a server that has just been at work."""
    target = bench.target(server)
    _warm(bench, server, rate)
    requests, generator = drive(target, workload, phases, rate, seed)
    first = phases[0].seconds
    found = requests.within(0, first).figures(first, SLO_MS)
    found["generator_late_p99_ms"] = generator.lateness.percentile_ms(99)
    if len(phases) > 1:
        found["bad_until_s"] = requests.bad_until_s(first, SLO_MS)
    return found


def _warm(bench: Bench, server: BertServer, rate: float) -> None:
    """Half of the load for a moment, so that caches are warm and the server's costs are the present ones."""
    half = (Phase(_WARM_S, _WARM_SHARE, _WARM_SHARE),)
    drive(bench.target(server), bench.mixed, half, min(rate, bench.guess()), 1000)


def capacity_of(bench: Bench, subject: str, workload: Workload) -> dict[str, Any]:
    """The highest rate at which a subject keeps the objective."""
    return find_capacity(bench.target(bench.server(subject)), workload, bench.plan.probe_s, 0.8 * bench.guess())


def _at_share(bench: Bench, subject: str, share: float, seconds: float, seed: int) -> dict[str, float]:
    """An even load that is a share of the baseline's capacity."""
    rate = share * bench.capacity(BASELINE)
    return {"rate": rate, **_run(bench, bench.server(subject), bench.mixed, even(seconds), rate, seed)}


def _overload(bench: Bench, subject: str, factor: float) -> dict[str, float]:
    """A multiple of our own capacity with the objective as everybody's deadline, and half of it afterwards."""
    rate = bench.capacity(OURS)
    phases = (Phase(bench.plan.overload_s, factor, factor), Phase(_AFTER_S, _LOAD_AFTER, _LOAD_AFTER))
    return {"rate": factor * rate, **_run(bench, bench.server(subject, deadline=True), bench.mixed, phases, rate, 7)}


def _knee(bench: Bench, factor: float) -> dict[str, float]:
    """Texts of 8 tokens alone, where the server itself costs as much as the engine."""
    rate = factor * bench.capacity(OURS, bench.short)
    server = bench.server(OURS, deadline=True)
    return {"rate": rate, **_run(bench, server, bench.short, even(bench.plan.probe_s), rate, 9)}
