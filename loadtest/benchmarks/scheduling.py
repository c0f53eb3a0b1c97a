"""Our scheduling compared with FIFO, also under overload; and measured runs compared with their simulation.

Subjects are our server, ours with FIFO (the baseline), and both with the objective as the default deadline for the
overload runs: a server must know the deadline to refuse in time. Each step needs the results of the steps before it.
"""

from __future__ import annotations

import itertools
import statistics
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from loadtest.benchmarks import simulator
from loadtest.benchmarks.drive import SLO_MS, block, drive, even, find_capacity, mixed_texts
from loadtest.benchmarks.runner import Benchmark, Option
from loadtest.benchmarks.server_process import HOST, BertServer
from loadtest.benchmarks.show import chart
from loadtest.generator.messages import Target
from loadtest.generator.scenario import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.benchmarks.drive import Requests, Workload
    from loadtest.benchmarks.store import Step, Store

OURS, BASELINE = "ours", "baseline"
SHARES = (0.3, 0.5, 0.65, 0.8, 0.9, 1.0, 1.15)
OVERLOADS = (0.5, 1.0, 1.5, 2.0, 5.0, 10.0)
_BUDGETS = (256, 512, 1024, 2048)
REPLAYED = (0.3, 0.6, 0.8)
"""Simulated rates, as shares of the measured capacity."""

_LOAD_AFTER, _AFTER_S = 0.5, 10.0
_WARM_SHARE, _WARM_S = 0.5, 3.0
_SETTLED_S = 15.0
_REPLY_US, _BATCH_US = 100.0, 70.0
"""Server overhead after the engine's work, from the CPU times of docs/benchmarks/main-job.md."""

_GOOD = {2.0: 0.95, 5.0: 0.90, 10.0: 0.75}
_TAIL = {2.0: 1.25, 10.0: 2.0}
_REFUSAL_MS, _RECOVERY_S = 20.0, 5.0
_COMPARED = ("short_p99_ms", "p99_ms", "long_p99_ms", "p50_ms", "answered_per_s")
_OFFERED = "offered requests a second"

Runs = list[dict[str, Any]]


class _Scheduling(Benchmark):
    """Common base of both benchmarks: servers by subject, texts, and capacities."""

    rounds = 5
    seconds = 30.0
    own: ClassVar[tuple[Option, ...]] = (
        Option("--probe-s", 15.0, "Duration of a run of a capacity search, in seconds (default: %(default)s)."),
    )
    overload_s = 60.0

    def facts(self) -> dict[str, Any]:
        options = self.options
        overload_s = getattr(options, "overload_s", self.overload_s)
        plan = {"rounds": options.rounds, "seconds": options.seconds, "overload_s": overload_s}
        return {**self.model_facts(), "plan": {**plan, "probe_s": options.probe_s}}

    @cached_property
    def mixed(self) -> Workload:
        return mixed_texts(self.bundle)

    def bert(self, subject: str, *, deadline: bool = False) -> BertServer:
        """A subject's server."""
        options = _fifo(self.store.steps["budget"]["best"]) if subject == BASELINE else ()
        return self.server(*options, *(("--default-timeout-ms", f"{SLO_MS:.0f}") if deadline else ()))

    def target(self, server: BertServer) -> Target:
        return Target("http", HOST, server.http_port, self.bundle.model)

    def guess(self) -> float:
        """Mixed texts per second that a device answers one by one, by the server's own cost table."""
        table = _costs(self.bert(OURS).get("/status"))["table"]
        alone = [row for row in table if row["kind"] == "wide" and row["texts"] == 1]
        nearest = (min(alone, key=lambda row: abs(row["tokens"] - tokens)) for tokens in self.mixed.tokens)
        pairs = zip(nearest, self.mixed.tokens, strict=True)
        return 1e6 / statistics.fmean(row["measured_us"] * tokens / row["tokens"] for row, tokens in pairs)

    def capacity(self, of: str) -> float:
        """The stored capacity of a subject."""
        return float(self.store.steps[f"capacity {of}"]["capacity_per_s"])

    def find_capacity(self, subject: str) -> dict[str, Any]:
        """The highest rate at which a subject meets the objective."""
        return find_capacity(self.target(self.bert(subject)), self.mixed, self.options.probe_s, 0.8 * self.guess())


def _fifo(budget: int) -> tuple[str, ...]:
    return ("--scheduling", "fifo", "--max-batch-tokens", str(budget))


def _costs(status: Any) -> Any:  # noqa: ANN401  JSON
    """Costs of the only model that has any."""
    [model] = [model for model in status["models"] if model["costs"]]
    return model["costs"]


class SchedulingBenchmark(_Scheduling):
    """`make bench-scheduling`."""

    name = "scheduling"
    purpose = "Compare deadline scheduling with FIFO, also under overload."
    own = (
        *_Scheduling.own,
        Option(
            "--overload-s", _Scheduling.overload_s, "Duration of an overload run, in seconds (default: %(default)s)."
        ),
    )

    def steps(self) -> Iterator[Step]:
        options = self.options
        yield "budget", self._budget
        for subject in (OURS, BASELINE):
            yield f"capacity {subject}", partial(self.find_capacity, subject)
        for number in range(1, options.rounds + 1):
            for subject in (OURS, BASELINE) if number % 2 else (BASELINE, OURS):
                yield f"turn {number} {subject}", partial(self._at_share, subject, 0.8, options.seconds, number)
        for share, subject in itertools.product(SHARES, (OURS, BASELINE)):
            yield f"share {share:g} {subject}", partial(self._at_share, subject, share, options.probe_s, 50)
        for factor, subject in itertools.product(OVERLOADS, (OURS, BASELINE)):
            yield f"overload {factor:g} {subject}", partial(self._overload, subject, factor)

    def _budget(self) -> dict[str, Any]:
        """The budget with the baseline's best p99, at three quarters of the one-by-one rate."""
        rate, tried = 0.75 * self.guess(), {}
        for budget in _BUDGETS:
            with self.new_server(*_fifo(budget)) as server:
                tried[str(budget)] = self._run(server, even(self.options.probe_s), rate, 1)
        best = min(tried, key=lambda budget: tried[budget].get("p99_ms", float("inf")))
        return {"rate": rate, "tried": tried, "best": int(best)}

    def _run(self, server: BertServer, phases: tuple[Phase, ...], rate: float, seed: int) -> dict[str, float]:
        """Figures of the first phase, on a server that has just been under load."""
        target = self.target(server)
        # Half of the load for a moment, so that caches are warm and the server's costs are current.
        drive(target, self.mixed, (Phase(_WARM_S, _WARM_SHARE, _WARM_SHARE),), min(rate, self.guess()), 1000)
        return block(target, self.mixed, phases, rate, seed)

    def _at_share(self, subject: str, share: float, seconds: float, seed: int) -> dict[str, float]:
        """Even load at a share of the baseline's capacity."""
        return self._run(self.bert(subject), even(seconds), share * self.capacity(BASELINE), seed)

    def _overload(self, subject: str, factor: float) -> dict[str, float]:
        """A multiple of our own capacity with the objective as everybody's deadline, then half of our capacity."""
        phases = (Phase(self.options.overload_s, factor, factor), Phase(_AFTER_S, _LOAD_AFTER, _LOAD_AFTER))
        return self._run(self.bert(subject, deadline=True), phases, self.capacity(OURS), 7)

    def figures(self, store: Store) -> dict[str, Any]:
        capacity = store.steps.get(f"capacity {OURS}", {}).get("capacity_per_s")
        overload = [
            {"times": times, "who": who, **run, "met": _as_asked(float(times), run, capacity) if who == OURS else None}
            for (times, who), run in _named(store, "overload ")
        ]
        turns: dict[str, Runs] = {}
        for (_, who), found in _named(store, "turn "):
            turns.setdefault(who, []).append(found)
        ratios = {name: _ratio(turns, name) for name in _COMPARED} if len(turns) == len((OURS, BASELINE)) else {}
        return {
            "slo_ms": SLO_MS,
            "turns": turns,
            "ratios": ratios,
            "capacity": capacity,
            "overload": sorted(overload, key=lambda run: float(run["times"])),
            "fifo": {run["times"]: run["good_per_s"] for run in overload if run["who"] == BASELINE},
        }

    def plots(self, store: Store) -> dict[str, str]:
        drawn = {"tails": _tails_plot(store), "goodput": _goodput_plot(store)}
        return {name: svg for name, svg in drawn.items() if svg}


def _named(store: Store, prefix: str) -> list[tuple[list[str], Any]]:
    """Steps with this prefix: the words behind the prefix, and the result."""
    return [(name.split(), found) for name, found in store.named(prefix).items()]


def _ratio(turns: dict[str, Runs], name: str) -> float:
    """Our median divided by the baseline's."""
    ours, baseline = (statistics.median(run[name] for run in turns[who]) for who in (OURS, BASELINE))
    return float(ours / baseline)


def _as_asked(factor: float, run: dict[str, Any], capacity: float) -> bool | None:
    if factor not in _GOOD:
        return None
    kept = run["good_per_s"] >= _GOOD[factor] * capacity and run["bad_until_s"] <= _RECOVERY_S
    kept = kept and run.get("p99_ms", 0.0) <= _TAIL.get(factor, float("inf")) * SLO_MS
    return bool(kept and (factor > min(_GOOD) or run.get("refusal_p99_ms", 0.0) <= _REFUSAL_MS))


def _tails_plot(store: Store) -> str:
    lines = {
        f"{subject}, {name}": (colour, _curve(store, "share ", subject, key))
        for subject, name, key, colour in (
            (OURS, "short third", "short_p99_ms", "blue"),
            (OURS, "long third", "long_p99_ms", "violet"),
            (BASELINE, "short third", "short_p99_ms", "orange"),
            (BASELINE, "long third", "long_p99_ms", "grey"),
        )
    }
    title, limits = "p99 of short and of long texts", [(SLO_MS, f"{SLO_MS:g} ms")]
    return chart(title, _OFFERED, "p99, ms", lines, log_up=True, limits=limits) if _is_whole(lines) else ""


def _goodput_plot(store: Store) -> str:
    colours = {OURS: "blue", BASELINE: "orange"}
    lines = {who: (colour, _curve(store, "overload ", who, "good_per_s")) for who, colour in colours.items()}
    title = f"Goodput: answers within {SLO_MS:g} ms"
    return chart(title, _OFFERED, "good answers a second", lines, log_across=True) if _is_whole(lines) else ""


def _curve(store: Store, prefix: str, who: str, key: str) -> list[tuple[float, float]]:
    found = [(run["rate"], run[key]) for (_, subject), run in _named(store, prefix) if subject == who and key in run]
    return sorted(found)


def _is_whole(lines: dict[str, tuple[str, list[tuple[float, float]]]]) -> bool:
    return all(points for _, points in lines.values())


class SimulatedBenchmark(_Scheduling):
    """Measures whether the simulation is right: measured runs, and the simulation of the same requests."""

    name = "simulated"
    purpose = "Compare measured runs with the simulation of the same requests."

    def steps(self) -> Iterator[Step]:
        yield f"capacity {OURS}", partial(self.find_capacity, OURS)
        yield "calm", self._calm
        for number, share in itertools.product(range(1, self.options.rounds + 1), REPLAYED):
            yield f"replay {number} {share:g}", partial(self._replayed, share, number)

    def _calm(self) -> dict[str, Any]:
        """Server overhead of a request without others, as options of the simulator; and the server's costs."""
        server, rate = self.bert(OURS), min(REPLAYED) * self.capacity(OURS)
        requests, _ = drive(self.target(server), self.mixed, even(self.options.seconds), rate, 70)
        each_us, token_us = requests.overhead_us()
        costs = _costs(server.get("/status"))
        wire_us = max(0.0, costs["corrections"]["wide"]["overhead_us"] - _BATCH_US)
        receive_us = max(0.0, each_us - wire_us - _BATCH_US - _REPLY_US)
        added = {"receive": receive_us, "token": token_us, "reply": _REPLY_US, "batch": _BATCH_US, "wire": wire_us}
        names = ("kind", "tokens", "texts", "measured_us", "spread_us")
        return {"overhead": added, "table": [[row[name] for name in names] for row in costs["table"]]}

    def _replayed(self, share: float, number: int) -> dict[str, Any]:
        """A measured run, and its simulation with the costs that the server learned under the same load."""
        rate, seconds, phases = share * self.capacity(OURS), self.options.seconds, even(self.options.seconds)
        server, overhead = self.bert(OURS), self.store.steps["calm"]["overhead"]
        target = self.target(server)
        # Its corrections match this load only after some of it.
        drive(target, self.mixed, even(_SETTLED_S), rate, 1000 + number)
        requests, generator = drive(target, self.mixed, phases, rate, 100 + number)
        measured = requests.figures(seconds, SLO_MS) | _stages(requests)
        measured["generator_late_p99_ms"] = generator.lateness.percentile_ms(99)
        # The run itself gives the costs of batches, because the host's speed differs between runs.
        status = server.get("/status")
        told = simulator.replay(status, self.mixed.requests(phases, rate, 100 + number), seconds, overhead)
        names = ("answered_per_s", "p50_ms", "p99_ms", "short_p99_ms", "queue_ms", "compute_ms")
        learned = _costs(status)["corrections"]
        return {"measured": measured, "simulated": {name: told[name] for name in names}, "corrections": learned}

    def figures(self, store: Store) -> dict[str, Any]:
        """Runs of each share, and the error of the simulation by figure: the median of the runs, relative."""
        shares: dict[float, Runs] = {share: [] for share in REPLAYED}
        for (_, share), found in _named(store, "replay "):
            shares[float(share)].append(found)
        shares = {share: runs for share, runs in shares.items() if runs}
        off = {
            share: {
                name: statistics.median(run["simulated"][name] / run["measured"][name] for run in runs) - 1
                for name in ("p50_ms", "p99_ms", "answered_per_s")
            }
            for share, runs in shares.items()
        }
        return {"shares": shares, "off": off, "slo_ms": SLO_MS}


def _stages(requests: Requests) -> dict[str, float]:
    """Means of the stages that the server reports."""
    told = requests.answered & (requests.compute_us >= 0)
    return {f"{name}_ms": float(getattr(requests, f"{name}_us")[told].mean() / 1e3) for name in ("queue", "compute")}
