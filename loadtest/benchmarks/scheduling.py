"""Our scheduling beside first come, first served, and under overload; and measured runs beside their simulation.

Subjects are our server, ours with first come, first served (the baseline), and both with the objective as the default
deadline, for overload: only who knows when an answer becomes useless can refuse in time. Each step needs what the ones
before it found.
"""

from __future__ import annotations

import itertools
import statistics
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from loadtest.benchmarks import simulator
from loadtest.benchmarks.drive import SLO_MS, drive, even, find_capacity, mixed_texts, short_texts
from loadtest.benchmarks.runner import Benchmark, Option, Page, Part, Picture, model_of
from loadtest.benchmarks.server_process import HOST, BertServer
from loadtest.benchmarks.show import chart, figure, median, table
from loadtest.generator.messages import Target
from loadtest.generator.scenario import Phase
from loadtest.report.tables import MET, Table
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadtest.benchmarks.drive import Requests, Workload
    from loadtest.benchmarks.store import Step, Store

OURS, BASELINE = "ours", "baseline"
SHARES = (0.3, 0.5, 0.65, 0.8, 0.9, 1.0, 1.15)
OVERLOADS = (0.5, 1.0, 1.5, 2.0, 5.0, 10.0)
KNEE = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
BUDGETS = (256, 512, 1024, 2048)
REPLAYED = (0.3, 0.6, 0.8)
"""Of the capacity that is found first: rates of the runs that are simulated too."""

_LOAD_AFTER, _AFTER_S = 0.5, 10.0
_WARM_SHARE, _WARM_S = 0.5, 3.0
_SETTLED_S = 15.0
_REPLY_US, _BATCH_US = 100.0, 70.0
"""Of what the server adds, the parts behind the engine's work: by the CPU time of docs/benchmarks/main-job.md."""

_SHORT, _ALL, _ANSWERED = 0.6, 1.1, 0.98
_GOOD = {2.0: 0.95, 5.0: 0.90, 10.0: 0.75}
_TAIL = {2.0: 1.25, 10.0: 2.0}
_REFUSAL_MS, _RECOVERY_S, _KNEE, _NEAR = 20.0, 5.0, 0.9, 0.15

Steps = dict[str, Any]


class _Scheduling(Benchmark):
    """What both benchmarks share: servers by subject, texts, and capacities."""

    rounds = 5
    seconds = 30.0
    own: ClassVar[tuple[Option, ...]] = (Option("--probe-s", 15.0, "a run of a search (%(default)s)"),)
    overload_s = 60.0

    def facts(self) -> dict[str, Any]:
        options = self.options
        overload_s = getattr(options, "overload_s", self.overload_s)
        plan = {"rounds": options.rounds, "seconds": options.seconds, "overload_s": overload_s}
        return {**self.model_facts(), "plan": {**plan, "probe_s": options.probe_s}}

    @cached_property
    def mixed(self) -> Workload:
        return mixed_texts(self.bundle)

    @cached_property
    def short(self) -> Workload:
        return short_texts(self.bundle)

    def bert(self, subject: str, *, deadline: bool = False) -> BertServer:
        """A subject's server, started and warm."""
        options = _fifo(self.store.steps["budget"]["best"]) if subject == BASELINE else ()
        return self.server(*options, *(("--default-timeout-ms", f"{SLO_MS:.0f}") if deadline else ()))

    def target(self, server: BertServer) -> Target:
        return Target("http", HOST, server.http_port, self.bundle.model)

    def guess(self) -> float:
        """Requests of the mixed texts a second that a device does one by one, by the server's own table."""
        table = _costs(self.bert(OURS).get("/status"))["table"]
        alone = [row for row in table if row["kind"] == "wide" and row["texts"] == 1]
        nearest = (min(alone, key=lambda row: abs(row["tokens"] - tokens)) for tokens in self.mixed.tokens)
        pairs = zip(nearest, self.mixed.tokens, strict=True)
        return 1e6 / statistics.fmean(row["measured_us"] * tokens / row["tokens"] for row, tokens in pairs)

    def capacity(self, of: str) -> float:
        """What was found of it."""
        return float(self.store.steps[f"capacity {of}"]["capacity_per_s"])

    def find_capacity(self, subject: str, *, short: bool = False) -> dict[str, Any]:
        """The highest rate at which a subject keeps the objective."""
        target, workload = self.target(self.bert(subject)), self.short if short else self.mixed
        return find_capacity(target, workload, self.options.probe_s, 0.8 * self.guess())


def _fifo(budget: int) -> tuple[str, ...]:
    return ("--scheduling", "fifo", "--max-batch-tokens", str(budget))


def _costs(status: Any) -> Any:  # noqa: ANN401  JSON
    """Those of the only model that has any."""
    [model] = [model for model in status["models"] if model["costs"]]
    return model["costs"]


class SchedulingBenchmark(_Scheduling):
    """`make bench-scheduling`."""

    name = "scheduling"
    purpose = "deadlines beside first come, first served; overload"
    own = (*_Scheduling.own, Option("--overload-s", _Scheduling.overload_s, "length (%(default)s)"))

    def steps(self) -> Iterator[Step]:
        options = self.options
        yield "budget", self._budget
        for subject in (OURS, BASELINE):
            yield f"capacity {subject}", partial(self.find_capacity, subject)
        yield "capacity of short texts", partial(self.find_capacity, OURS, short=True)
        for number in range(1, options.rounds + 1):
            for subject in (OURS, BASELINE) if number % 2 else (BASELINE, OURS):
                yield f"turn {number} {subject}", partial(self._at_share, subject, 0.8, options.seconds, number)
        for share, subject in itertools.product(SHARES, (OURS, BASELINE)):
            yield f"share {share:g} {subject}", partial(self._at_share, subject, share, options.probe_s, 50)
        for factor, subject in itertools.product(OVERLOADS, (OURS, BASELINE)):
            yield f"overload {factor:g} {subject}", partial(self._overload, subject, factor)
        for factor in KNEE:
            yield f"knee {factor:g}", partial(self._knee, factor)

    def _budget(self) -> dict[str, Any]:
        """The budget with which the baseline has its best p99, at three quarters of what one by one would carry."""
        rate, tried = 0.75 * self.guess(), {}
        for budget in BUDGETS:
            options = self.options
            with BertServer(options.models, options.precision, available_cpus(), *_fifo(budget)) as server:
                tried[str(budget)] = self._run(server, self.mixed, even(options.probe_s), rate, 1)
        best = min(tried, key=lambda budget: tried[budget].get("p99_ms", float("inf")))
        return {"rate": rate, "tried": tried, "best": int(best)}

    def _run(
        self, server: BertServer, workload: Workload, phases: tuple[Phase, ...], rate: float, seed: int
    ) -> dict[str, float]:
        """The figures of the first phase, on a server that has just been at work."""
        target, first = self.target(server), phases[0].seconds
        # Half of the load for a moment, so that caches are warm and the server's costs are the present ones.
        drive(target, self.mixed, (Phase(_WARM_S, _WARM_SHARE, _WARM_SHARE),), min(rate, self.guess()), 1000)
        requests, generator = drive(target, workload, phases, rate, seed)
        found = requests.within(0, first).figures(first, SLO_MS)
        found["generator_late_p99_ms"] = generator.lateness.percentile_ms(99)
        if len(phases) > 1:
            found["bad_until_s"] = requests.bad_until_s(first, SLO_MS)
        return found

    def _at_share(self, subject: str, share: float, seconds: float, seed: int) -> dict[str, float]:
        """An even load that is a share of the baseline's capacity."""
        rate = share * self.capacity(BASELINE)
        return {"rate": rate, **self._run(self.bert(subject), self.mixed, even(seconds), rate, seed)}

    def _overload(self, subject: str, factor: float) -> dict[str, float]:
        """A multiple of our own capacity with the objective as everybody's deadline, and half of it afterwards."""
        rate = self.capacity(OURS)
        phases = (Phase(self.options.overload_s, factor, factor), Phase(_AFTER_S, _LOAD_AFTER, _LOAD_AFTER))
        return {"rate": factor * rate, **self._run(self.bert(subject, deadline=True), self.mixed, phases, rate, 7)}

    def _knee(self, factor: float) -> dict[str, float]:
        """Texts of 8 tokens alone, where the server itself costs as much as the engine."""
        rate = factor * self.capacity("of short texts")
        return {
            "rate": rate,
            **self._run(self.bert(OURS, deadline=True), self.short, even(self.options.probe_s), rate, 9),
        }

    def page(self, store: Store) -> Page:
        return page(store)


def page(store: Store) -> Page:
    """The page, as far as it has been measured."""
    method = (
        "Texts of 6 to 250 words of real English in even steps, open loop, Poisson arrivals, over HTTP; the generator"
        " shares the cores with the server. A latency counts from the intended time. The baseline is the same server"
        " with `--scheduling fifo`: the oldest texts first, as many as fit one token budget,"
        " text-embeddings-inference's rule. What the simulator makes of measured runs: [simulated.md](simulated.md)."
    )
    steps = store.steps
    tails, goodput = ("tails", _tails_plot), ("goodput", _goodput_plot)
    parts: list[Part] = []
    for section, drawn in ((_budget, None), (_capacity, None), (_turns, tails), (_overload, goodput), (_knee, None)):
        if (made := section(steps)) is not None:
            parts.append(made)
            if drawn and (svg := drawn[1](steps)):
                parts.append(Picture(drawn[0], svg))
    title = "Scheduling: batches against deadlines, beside first come, first served"
    return Page(title, method, parts, facts=model_of(store))


def _named(steps: Steps, prefix: str) -> list[tuple[list[str], Any]]:
    """Steps of a kind: the words behind the prefix, and what was found."""
    return [(name.removeprefix(prefix).split(), found) for name, found in steps.items() if name.startswith(prefix)]


def _budget(steps: Steps) -> Table | None:
    if (found := steps.get("budget")) is None:
        return None
    return table(
        "The baseline's budget",
        f"At {found['rate']:.0f} requests a second; the baseline has the one with the best p99, {found['best']}.",
        [{"budget": budget, **run} for budget, run in found["tried"].items()],
        ("padded tokens", lambda run: run["budget"]),
        ("p50 ms", figure("p50_ms")),
        ("p99 ms", figure("p99_ms")),
        ("answered/s", figure("answered_per_s")),
    )


def _capacity(steps: Steps) -> Table | None:
    found = _named(steps, "capacity ")
    note = (
        f"The highest rate at which p99 <= {SLO_MS:g} ms; a request without an answer counts as one that took for ever."
    )
    columns = (
        ("of", lambda step: " ".join(step[0])),
        ("requests/s", lambda step: f"{step[1]['capacity_per_s'] or 0:.1f}"),
        ("how sure", lambda step: step[1]["confidence"]),
    )
    return table("Capacity", note, found, *columns, words=1) if found else None


_COLUMNS = {
    "short_p99_ms": ("short p99 ms", _SHORT),
    "p99_ms": ("p99 ms", _ALL),
    "long_p99_ms": ("long p99 ms", None),
    "p50_ms": ("p50 ms", None),
    "answered_per_s": ("answered/s", None),
}
"""Of the turns: what each column is called, and what its ratio may be at most."""


def _turns(steps: Steps) -> Table | None:
    runs: dict[str, list[Any]] = {}
    for (_, subject), found in _named(steps, "turn "):
        runs.setdefault(subject, []).append(found)
    if runs.keys() < {OURS, BASELINE}:
        return None
    medians = {who: {n: statistics.median(run[n] for run in of) for n in _COLUMNS} for who, of in runs.items()}
    ratios = {n: medians[OURS][n] / medians[BASELINE][n] for n in _COLUMNS}
    met = [MET[ratios[n] <= limit] if limit else "" for n, (_, limit) in list(_COLUMNS.items())[:-1]]
    rows = [
        *([subject, *(f"{medians[subject][n]:.1f}" for n in _COLUMNS)] for subject in (OURS, BASELINE)),
        ["ratio", *(f"{ratio:.2f}" for ratio in ratios.values())],
        ["as asked", *met, MET[ratios["answered_per_s"] >= _ANSWERED]],
    ]
    note = (
        f"In turns, medians of {min(map(len, runs.values()))}. Asked: p99 of the shortest third at most {_SHORT:g}"
        f" times the baseline's, of all at most {_ALL:g} times, throughput not lower (by more than 2%)."
    )
    head = ("at 0.8 C", *(words for words, _ in _COLUMNS.values()))
    return Table("Short texts beside long ones", note, head, rows, words=1)


def _overload(steps: Steps) -> Table | None:
    found = _named(steps, "overload ")
    if not found or f"capacity {OURS}" not in steps:
        return None
    own = float(steps[f"capacity {OURS}"]["capacity_per_s"])
    rows = [{"times": factor, "who": subject, **run} for (factor, subject), run in found]
    note = (
        f"Multiples of our own capacity ({own:.1f}/s), with a deadline of {SLO_MS:g} ms for everybody; then half of it."
        " Good: answered within the deadline; refused: on arrival; missed: taken, and dropped at the deadline."
        " Back after: seconds until the last request that had no good answer."
        " Asked: goodput of 95, 90 and 75% at 2, 5 and 10 times, p99 at most 1.25 times the deadline at 2 times and"
        " twice at 10, refusals within 20 ms at 2 times, back within 5 s."
    )
    return table(
        "Overload",
        note,
        sorted(rows, key=lambda run: (float(run["times"]), run["who"] != OURS)),
        ("times", lambda run: run["times"]),
        ("who", lambda run: run["who"]),
        ("offered/s", figure("rate", 0)),
        ("good/s", figure("good_per_s")),
        ("of capacity", lambda run: f"{100 * run['good_per_s'] / own:.0f}%"),
        ("refused/s", figure("refused_per_s")),
        ("missed/s", figure("missed_per_s")),
        ("p99 ms", figure("p99_ms")),
        ("refusal p99 ms", figure("refusal_p99_ms")),
        ("back after s", figure("bad_until_s")),
        ("as asked", lambda run: _as_asked(float(run["times"]), run, own) if run["who"] == OURS else ""),
        words=2,
    )


def _as_asked(factor: float, run: dict[str, Any], own: float) -> str:
    if factor not in _GOOD:
        return ""
    kept = run["good_per_s"] >= _GOOD[factor] * own and run["bad_until_s"] <= _RECOVERY_S
    kept = kept and run.get("p99_ms", 0.0) <= _TAIL.get(factor, float("inf")) * SLO_MS
    return MET[kept and (factor > min(_GOOD) or run.get("refusal_p99_ms", 0.0) <= _REFUSAL_MS)]


def _knee(steps: Steps) -> Table | None:
    found = _named(steps, "knee ")
    held = [run["rate"] for _, run in found if run["good_per_s"] >= _KNEE * run["offered_per_s"]]
    knee = f"the last rate with nine of ten requests in time is {max(held):.0f}/s" if held else "none kept nine of ten"
    note = (
        "Multiples of the capacity for texts of 8 tokens. Here receiving and refusing costs as much as computing, on"
        f" the same cores: {knee}."
    )
    columns = (
        ("times", lambda run: run["times"]),
        ("offered/s", figure("rate", 0)),
        ("good/s", figure("good_per_s", 0)),
        ("refused/s", figure("refused_per_s", 0)),
        ("p99 ms", figure("p99_ms")),
    )
    rows = [{"times": factor, **run} for (factor,), run in found]
    return table("Texts of 8 tokens", note, rows, *columns) if found else None


def _tails_plot(steps: Steps) -> str:
    lines = {
        f"{subject}, {name}": (colour, _curve(steps, "share ", subject, key))
        for subject, name, key, colour in (
            (OURS, "short third", "short_p99_ms", "blue"),
            (OURS, "long third", "long_p99_ms", "violet"),
            (BASELINE, "short third", "short_p99_ms", "orange"),
            (BASELINE, "long third", "long_p99_ms", "grey"),
        )
    }
    title, limits = "p99 of short and of long texts", [(SLO_MS, f"{SLO_MS:g} ms")]
    return chart(title, _OFFERED, "p99, ms", lines, log_up=True, limits=limits) if _is_whole(lines) else ""


def _goodput_plot(steps: Steps) -> str:
    colours = {OURS: "blue", BASELINE: "orange"}
    lines = {who: (colour, _curve(steps, "overload ", who, "good_per_s")) for who, colour in colours.items()}
    title = f"Goodput: answers within {SLO_MS:g} ms"
    return chart(title, _OFFERED, "good answers a second", lines, log_across=True) if _is_whole(lines) else ""


_OFFERED = "offered requests a second"


def _curve(steps: Steps, prefix: str, who: str, key: str) -> list[tuple[float, float]]:
    found = [(run["rate"], run[key]) for (_, subject), run in _named(steps, prefix) if subject == who and key in run]
    return sorted(found, key=lambda point: point[0])


def _is_whole(lines: dict[str, tuple[str, list[tuple[float, float]]]]) -> bool:
    return all(points for _, points in lines.values())


class SimulatedBenchmark(_Scheduling):
    """Whether the simulation tells the truth: measured runs and the simulation of the very same requests."""

    name = "simulated"
    purpose = "measured runs beside the simulation of the same requests"

    def steps(self) -> Iterator[Step]:
        yield f"capacity {OURS}", partial(self.find_capacity, OURS)
        yield "calm", self._calm
        for number, share in itertools.product(range(1, self.options.rounds + 1), REPLAYED):
            yield f"replay {number} {share:g}", partial(self._replayed, share, number)

    def _calm(self) -> dict[str, Any]:
        """What the server adds to a request that meets no other, as options of the simulator; and its costs."""
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
        """A measured run, and its simulation with what the server has learned of its costs under the same load."""
        rate, seconds, phases = share * self.capacity(OURS), self.options.seconds, even(self.options.seconds)
        server, overhead = self.bert(OURS), self.store.steps["calm"]["overhead"]
        target = self.target(server)
        # Its corrections are those of this load only after some of it.
        drive(target, self.mixed, even(_SETTLED_S), rate, 1000 + number)
        requests, generator = drive(target, self.mixed, phases, rate, 100 + number)
        measured = requests.figures(seconds, SLO_MS) | _stages(requests)
        measured["generator_late_p99_ms"] = generator.lateness.percentile_ms(99)
        # What batches cost is given, by the run itself: the host's speed differs from one run to the next.
        status = server.get("/status")
        told = simulator.replay(status, self.mixed.requests(phases, rate, 100 + number), seconds, overhead)
        names = ("answered_per_s", "p50_ms", "p99_ms", "short_p99_ms", "queue_ms", "compute_ms")
        learned = _costs(status)["corrections"]
        return {"measured": measured, "simulated": {name: told[name] for name in names}, "corrections": learned}

    def page(self, store: Store) -> Page:
        return replays_page(store)


def _stages(requests: Requests) -> dict[str, float]:
    """Means of what the server says of its stages."""
    told = requests.answered & (requests.compute_us >= 0)
    return {f"{name}_ms": float(getattr(requests, f"{name}_us")[told].mean() / 1e3) for name in ("queue", "compute")}


def replays_page(store: Store) -> Page:
    """The page, as far as it has been measured."""
    method = (
        "Texts of 6 to 250 words of real English in even steps, open loop, Poisson arrivals, over HTTP; the generator"
        " shares the cores with the server. The very arrivals and lengths of each measured run are replayed by"
        " `bertserve simulate`, with the server's table and what `/status` says at the end of the run: how far batches"
        " were off lately, how much they varied, and how long that lasts. So what batches cost is given, and what"
        " the simulator makes of it is compared."
    )
    replays = store.named("replay ")
    by_share = {share: [run for n, run in replays.items() if float(n.split()[1]) == share] for share in REPLAYED}
    found = [(share, runs) for share, runs in by_share.items() if runs]
    parts = [_figures(store, found), _means(found)] if found else []
    return Page("Simulated against measured", method, parts, facts=model_of(store))


def _off(runs: Sequence[Any], name: str) -> float:
    """How far the simulation is from the measurement, relative: the median of the runs."""
    return float(statistics.median(run["simulated"][name] / run["measured"][name] for run in runs) - 1)


def _both(runs: Sequence[Any], name: str) -> list[str]:
    return [median(name)([run[who] for run in runs]) for who in ("measured", "simulated")]


def _figures(store: Store, found: Sequence[tuple[float, Sequence[Any]]]) -> Table:
    names = {"p50_ms": "p50 ms", "p99_ms": "p99 ms", "answered_per_s": "answered/s"}
    rows = [
        [
            f"{share:g}",
            *(cell for name in names for cell in (*_both(runs, name), f"{100 * _off(runs, name):+.0f}%")),
            MET[all(abs(_off(runs, name)) <= _NEAR for name in names)],
        ]
        for share, runs in found
    ]
    head = [word for name in names.values() for word in (f"{name} measured", "simulated", "off")]
    calm, capacity = store.steps["calm"]["overhead"], store.steps[f"capacity {OURS}"]["capacity_per_s"]
    note = (
        f"C is {capacity:.1f} requests a second, the highest rate at which p99 <= {SLO_MS:g} ms. Medians of"
        f" {len(found[0][1])} runs, `off` of the ratios within a run. What the server adds was measured at"
        f" {min(REPLAYED):g} C: {calm['receive']:.0f} us a request to receive, {calm['token']:.1f} us a token,"
        f" {calm['reply']:.0f} us an answer, {calm['batch']:.0f} us a batch, {calm['wire']:.0f} us until an idle lane"
        " begins. Asked: all within 15%."
    )
    return Table("Latency and throughput", note, ("of C", *head, "as asked"), rows)


def _means(found: Sequence[tuple[float, Sequence[Any]]]) -> Table:
    rows = [[f"{share:g}", *_both(runs, "queue_ms"), *_both(runs, "compute_ms")] for share, runs in found]
    note = "Means, as the server's headers tell them: the wait for a lane, and the time of the engine. Medians of runs."
    head = ("of C", "queue ms measured", "simulated", "compute ms measured", "simulated")
    return Table("Stages", note, head, rows)
