"""What one T4 would answer: engine times as published, the server as measured, both together simulated.

No GPU takes part. The server is measured in front of an engine that sleeps as long as a T4 would compute: between two
requests nothing sweeps the CPU's caches, as a model on a CPU does.
"""

from __future__ import annotations

import json
import statistics
from functools import cached_property, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks import show, simulator
from loadtest.benchmarks.drive import Workload, drive, even
from loadtest.benchmarks.runner import Benchmark, Option, Page, Picture, model_of
from loadtest.benchmarks.server_process import HOST, BertServer
from loadtest.benchmarks.show import chart, figure
from loadtest.benchmarks.turns import Samples, Turn, measure_round, round_name
from loadtest.generator.messages import Target
from loadtest.generator.workload import make_texts
from loadtest.report.sample import Spread
from loadtest.report.tables import MET

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.benchmarks.runner import Part
    from loadtest.benchmarks.store import Step, Store
    from loadtest.report.tables import Table

_TEXTS, _SHORT, _TOKENS = 200, 8, 128
_SLO_MS = 10.0
_SLEPT = ("t4-bert-base-fp16-trt8", "t4-bert-base-int8-trt8")
"""Published tables that the engine sleeps by, at 128 tokens."""
_RATES = {_SLEPT[0]: (200, 300, 400, 500), _SLEPT[1]: (200, 400, 500, 600, 700)}
"""Requests a second that are sent to a server in front of such an engine."""
_ALONE = {
    "t4-bert-base-fp16-trt8": 2.4,
    "t4-bert-base-int8-trt8": 2.0,
    "t4-bert-base-fp16": 2.4,
    "t4-bert-base-int8": 2.0,
}
"""What a text alone may take from end to end at most, in milliseconds."""
_SIMULATED = {
    **dict.fromkeys(_SLEPT, (_SLO_MS, (128, 384))),
    "t4-bert-base-fp16": (_SLO_MS, (32, 128, 384)),
    "t4-bert-base-int8": (_SLO_MS, (32, 128, 384)),
    "t4-bert-large-fp16": (50.0, (128, 384)),
    "t4-bert-large-int8": (50.0, (128, 384)),
}
"""An objective for p99 in milliseconds, and the lengths that each table was published at."""
_SHARES = {"receive": 0.5, "reply": 0.3, "batch": 0.2}
"""Of the server's CPU time for a request that no token takes, by docs/benchmarks/main-job.md."""
_COLOURS = ("blue", "orange", "green")


def published(name: str, tokens: int) -> dict[int, dict[str, float]]:
    """The points of a table at one length, by the texts of a batch: `ms`, and `p99_ms` where that was published."""
    content = json.loads((files("loadtest.capacity") / "data" / "costs" / f"{name}.json").read_text(encoding="utf-8"))
    return {point["texts"]: point for point in content["points"] if point["tokens"] == tokens}


class T4Benchmark(Benchmark):
    """The server in front of engines that sleep, and the simulator with what it adds."""

    name = "t4"
    purpose = "what one T4 would answer: published engine times behind this server"
    rounds = 7
    seconds = 2.0

    own = (Option("--served-s", 8.0, "a run at a rate (%(default)s)"),)

    @cached_property
    def _servers(self) -> dict[str, BertServer]:
        """A server for each table, its engine asleep as long as that says."""
        servers = {}
        for table in _SLEPT:
            alone, *batches = ((texts, point["ms"]) for texts, point in published(table, _TOKENS).items())
            longer = ",".join(f"{texts}:{ms}" for texts, ms in batches)
            options = ("--fake-ms", str(alone[1]), "--fake-batch-ms", longer, "--engine", "fake", "--engine-nice", "0")
            # With one thread there is one lane, as on a GPU.
            server = BertServer(self.options.models, self.options.precision, 1, *options)
            servers[table] = self.stack.enter_context(server)
        return servers

    @cached_property
    def _texts(self) -> dict[int, list[str]]:
        path = self.bundle.path
        return {tokens: [text.text for text in make_texts(path, tokens, _TEXTS)] for tokens in (_SHORT, _TOKENS)}

    @cached_property
    def _ways(self) -> dict[str, BertServer]:
        """The servers, once the client knows them."""
        for table, server in self._servers.items():
            way: dict[str, Any] = {"way": table, "form": "embed", "port": server.http_port, "endpoint": "/embed"}
            self.client.ask("open", hidden_size=self.bundle.hidden_size, texts=self._texts, **way)
        return self._servers

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "components": self.bundle.hidden_size}

    def steps(self) -> Iterator[Step]:
        for number in range(1, self.options.rounds + 1):
            for tokens in (_SHORT, _TOKENS):
                yield round_name(number, tokens), partial(self.measure, number, tokens)
        for name, measure in (("served", self._served), ("expected", self._expected)):
            for table, rates in _RATES.items():
                for rate in rates:
                    yield f"{name} {table} {rate}", partial(measure, table, rate)
        for table, (slo_ms, lengths) in _SIMULATED.items():
            for tokens in lengths:
                yield f"simulated {table} {tokens}", partial(self._simulated, table, tokens, slo_ms)

    def measure(self, number: int, tokens: int) -> dict[str, Any]:
        """A text at a time: the samples by table, those of what the engine really slept among them."""
        turns = [
            Turn(table, self.client, {"way": table, "tokens": tokens, "connections": 1}, self.options.seconds, server)
            for table, server in self._ways.items()
        ]
        before = {table: self._slept(server) for table, server in self._servers.items()}
        samples = measure_round(turns if number % 2 else turns[::-1], self.say)
        for table, server in self._servers.items():
            count, ns = (after - start for after, start in zip(self._slept(server), before[table], strict=True))
            # Kept as a sample of its own, whose median is what the engine took on average.
            samples[_engine(table)] = {**samples[table], "p50_ms": ns / count / 1e6, "p99_ms": 0.0}
        return samples

    def _slept(self, server: BertServer) -> tuple[int, int]:
        """How many texts the engine has computed, and in how many nanoseconds."""
        [model] = server.get(f"/v2/models/{self.bundle.model}/stats")["model_stats"]
        computed = model["inference_stats"]["compute_infer"]
        return computed["count"], computed["ns"]

    def _served(self, table: str, rate: int) -> dict[str, float]:
        """Poisson arrivals at a rate."""
        server, seconds = self._servers[table], self.options.served_s
        target = Target("http", HOST, server.http_port, self.bundle.model)
        workload = Workload.of_tokens(self._texts[_TOKENS], _TOKENS)
        drive(target, workload, even(1.0), rate / 2, 1000)
        requests, _ = drive(target, workload, even(seconds), rate, rate)
        return requests.within(0, seconds).figures(seconds, _SLO_MS)

    def _expected(self, table: str, rate: int) -> Any:  # noqa: ANN401  JSON
        return simulator.at_rate(table, _TOKENS, rate, overhead(Samples.of(self.store)))

    def _simulated(self, table: str, tokens: int, slo_ms: float) -> Any:  # noqa: ANN401  JSON
        return simulator.capacity(table, tokens, slo_ms, overhead(Samples.of(self.store)))

    def page(self, store: Store) -> Page:
        samples = Samples.of(store)
        parts: list[Part] = [_alone(samples), _capacity(store)] if store.named("simulated ") else [_alone(samples)]
        parts += [_served(store)] if store.named("expected ") else []
        parts += [Picture(table.removeprefix("t4-"), _plot(store, table)) for table in _tables(store)]
        method = (
            f"The server runs behind HTTP on the machine above, its engine asleep for as long as TensorRT 8.0 took on a"
            f" T4; vectors have {store.facts['components']} components. {len(samples.rounds[_TOKENS])} rounds of"
            f" {store.facts['seconds']:g} s a measurement, in alternating order. {samples.quiet()}. No T4 was at hand:"
            " each figure says whether it was published, measured or simulated."
        )
        facts = {"model": f"{model_of(store)['model']}, of which only the shape matters"}
        return Page("One T4 behind this server", method, parts, facts=facts)


def _engine(table: str) -> str:
    return f"{table}, engine"


def _added(samples: Samples, table: str, tokens: int, figure: str) -> Spread:
    """What a text alone takes beside the engine, round by round, in milliseconds."""
    both = [table, _engine(table)]
    return Spread.of(samples.values(tokens, both, lambda all_of_it, engine: getattr(all_of_it, figure) - engine.p50_ms))


def overhead(samples: Samples) -> dict[str, float]:
    """The options of `bertserve simulate` that say what the server adds, in microseconds.

    CPU time of the server's process goes to requests and tokens by what texts of two lengths take; what is left of the
    latency beside it is the way to the engine and back, and the client's. That of a lone request holds the time for
    which its answer was looked for, so rates are rather too low.
    """
    cpu = {
        tokens: statistics.median(samples.spread(tokens, table, "server_cpu_us").median for table in _SLEPT)
        for tokens in (_SHORT, _TOKENS)
    }
    token = max(0.0, (cpu[_TOKENS] - cpu[_SHORT]) / (_TOKENS - _SHORT))
    fixed = max(0.0, cpu[_SHORT] - token * _SHORT)
    added = statistics.median(1e3 * _added(samples, table, _TOKENS, "p50_ms").median for table in _SLEPT)
    parts = {name: share * fixed for name, share in _SHARES.items()}
    return {**parts, "token": token, "wire": max(0.0, added - fixed - token * _TOKENS)}


def _alone(samples: Samples) -> Table:
    added = {figure: [_added(samples, of, _TOKENS, figure) for of in _SLEPT] for figure in ("p50_ms", "p99_ms")}
    p50, p99 = (statistics.median(spread.median for spread in spreads) for spreads in added.values())
    points = {name: published(name, _TOKENS)[1] for name in _ALONE}
    shown = "; ".join(f"{one.text(2)} and {other.text(2)}" for one, other in zip(*added.values(), strict=True))
    note = (
        f"One text of {_TOKENS} tokens at a time, over one connection. **Published**: average and, in brackets, p99 of"
        " the engine. **Measured**: what a request takes beside its engine, client included: p50 and p99 less what the"
        f" engine slept on average, medians with least and greatest of all rounds; {shown} ms ({' and '.join(_SLEPT)})."
        " **Put together**: p50 is the published average and the measured p50, p99 the sum of both p99."
    )
    return show.table(
        "A text alone",
        note,
        _ALONE,
        ("engine", str),
        ("published ms", lambda name: "{ms:.2f} ({p99_ms:.2f})".format(**points[name])),
        ("end to end p50 ms", lambda name: f"{points[name]['ms'] + p50:.2f}"),
        ("p99 ms", lambda name: f"{points[name]['p99_ms'] + p99:.2f}"),
        ("asked p50 ms", lambda name: f"{_ALONE[name]:g}"),
        ("as asked", lambda name: MET[points[name]["ms"] + p50 <= _ALONE[name]]),
        words=1,
    )


def _capacity(store: Store) -> Table:
    found = [{"of": name.split(), **run} for name, run in store.named("simulated ").items()]
    facts = dict.fromkeys(fact for run in found for fact in run["facts"] if not fact.startswith(("costs", "published")))
    note = (
        "**Simulated**: our scheduler over published tables, with what the server was measured to add; the highest"
        " Poisson rate that keeps an objective for p99, and the latencies there.\n\n"
        + "\n".join(f"- {fact}" for fact in facts)
    )
    return show.table(
        "Texts a second",
        note,
        found,
        ("table", lambda run: run["of"][0]),
        ("tokens", lambda run: run["of"][1]),
        ("objective ms", lambda run: f"{run['slo_ms']:g}"),
        ("requests/s", lambda run: f"{run['capacity_per_s']:.0f}" if run["capacity_per_s"] else "none"),
        ("p50 ms", figure("p50_ms")),
        ("p99 ms", figure("p99_ms")),
        words=1,
    )


def _served(store: Store) -> Table:
    runs: list[tuple[str, int, Any, Any]] = [
        (name, rate, store.steps.get(f"served {name} {rate}"), store.steps.get(f"expected {name} {rate}"))
        for name, rates in _RATES.items()
        for rate in rates
    ]
    note = (
        f"The server in front of the engine that sleeps, **measured** in an open loop of Poisson arrivals of texts of"
        f" {_TOKENS} tokens, the generator on the same two cores; beside it the same rate **simulated**. Good: answers"
        f" within {_SLO_MS:g} ms a second, as measured. A sleep ends some hundredths of a millisecond late, which"
        " the simulation leaves out."
    )
    return show.table(
        "At a rate",
        note,
        [run for run in runs if None not in run],
        ("table", lambda run: run[0]),
        ("offered/s", lambda run: run[1]),
        ("p50 ms measured", lambda run: figure("p50_ms")(run[2])),
        ("simulated", lambda run: figure("p50_ms")(run[3])),
        ("p99 ms measured", lambda run: figure("p99_ms")(run[2])),
        ("simulated", lambda run: figure("p99_ms")(run[3])),
        ("good/s", lambda run: figure("good_per_s", 0)(run[2])),
        words=1,
    )


def _tables(store: Store) -> list[str]:
    return sorted({name.split()[0] for name in store.named("simulated ")})


def _plot(store: Store, name: str) -> str:
    found = {step.split()[1]: run for step, run in store.named("simulated ").items() if step.split()[0] == name}
    lines = {}
    for colour, (tokens, run) in zip(_COLOURS, found.items(), strict=False):
        runs = [each for each in run["runs"] if each["p99_ms"] is not None]
        p99, p50 = ([(each["offered_per_s"], each[key]) for each in runs] for key in ("p99_ms", "p50_ms"))
        lines[f"{tokens} tokens: p99 (dots: p50)"] = (colour, p99, p50)
    slo_ms = next(iter(found.values()))["slo_ms"]
    title, limits = f"Simulated, not measured: {name.removeprefix('t4-')} on one T4", [(slo_ms, f"{slo_ms:g} ms")]
    return chart(title, "offered requests a second", "ms", lines, log_across=True, log_up=True, limits=limits)
