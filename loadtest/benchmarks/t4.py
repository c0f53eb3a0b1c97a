"""Predicts one T4 behind this server: published engine times, measured server, both together simulated.

No GPU takes part. The server is measured in front of an engine that sleeps as long as a T4 would compute. Between two
requests nothing evicts the CPU's caches, unlike with a model on a CPU.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import astuple, replace
from functools import cached_property, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from bertserve.export.pages.plots import Axis, Lines, Series, as_file
from bertserve.loadtest.benchmarks import simulator
from bertserve.loadtest.benchmarks.drive import Workload, block, drive, even
from bertserve.loadtest.benchmarks.runner import Benchmark, Option
from bertserve.loadtest.benchmarks.server_process import HOST
from bertserve.loadtest.benchmarks.turns import Samples, measure_round, round_name
from bertserve.loadtest.generator.messages import Target
from bertserve.loadtest.generator.workload import make_texts
from bertserve.loadtest.report.sample import Sample, Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bertserve.loadtest.benchmarks.server_process import BertServer
    from bertserve.loadtest.benchmarks.store import Step, Store
    from bertserve.loadtest.benchmarks.turns import Turn

_TEXTS, _SHORT, _TOKENS = 200, 8, 128
_SLO_MS = 10.0
_SLEPT = ("t4-bert-base-fp16-trt8", "t4-bert-base-int8-trt8")
"""Published tables that set the engine's sleep, at 128 tokens."""
_RATES = {_SLEPT[0]: (200, 300, 400, 500), _SLEPT[1]: (200, 400, 500, 600, 700)}
"""Requests per second sent to a server in front of such an engine."""
_ALONE = (*_SLEPT, "t4-bert-base-fp16", "t4-bert-base-int8")
_SIMULATED = {
    **dict.fromkeys(_SLEPT, (_SLO_MS, (128, 384))),
    **dict.fromkeys(("t4-bert-base-fp16", "t4-bert-base-int8"), (_SLO_MS, (32, 128, 384))),
    **dict.fromkeys(("t4-bert-large-fp16", "t4-bert-large-int8"), (50.0, (128, 384))),
}
"""Objective for p99 in milliseconds, and the published lengths of each table."""
_SHARES = {"receive": 0.5, "reply": 0.3, "batch": 0.2}
"""Parts of the server's CPU time per request that do not depend on tokens, from docs/benchmarks/main-job.md."""
_COLOURS = ("blue", "orange", "green")


def published(name: str, tokens: int) -> dict[int, dict[str, float]]:
    """The points of a table at one length, by batch size: `ms`, and `p99_ms` if published."""
    content = json.loads(
        (files("bertserve.loadtest.capacity") / "data" / "costs" / f"{name}.json").read_text(encoding="utf-8")
    )
    return {point["texts"]: point for point in content["points"] if point["tokens"] == tokens}


class T4Benchmark(Benchmark):
    """The server in front of sleeping engines, and the simulator with the measured overhead of the server."""

    name = "t4"
    purpose = "Simulate one T4 behind this server from published engine times."
    rounds = 7
    seconds = 2.0
    own = (Option("--served-s", 8.0, "Duration of a run at one rate, in seconds (default: %(default)s)."),)

    def _server(self, table: str) -> BertServer:
        """A server whose engine sleeps as long as a table says."""
        alone, *batches = ((texts, point["ms"]) for texts, point in published(table, _TOKENS).items())
        longer = ",".join(f"{texts}:{ms}" for texts, ms in batches)
        options = ("--fake-ms", str(alone[1]), "--fake-batch-ms", longer, "--engine", "fake")
        # One thread makes one lane, as on a GPU.
        return self.server(*options, threads=1)

    @cached_property
    def _texts(self) -> dict[int, list[str]]:
        path = self.bundle.path
        return {tokens: [text.text for text in make_texts(path, tokens, _TEXTS)] for tokens in (_SHORT, _TOKENS)}

    @cached_property
    def _asked(self) -> dict[str, Callable[..., Turn]]:
        size, texts, servers = self.bundle.hidden_size, self._texts, {table: self._server(table) for table in _SLEPT}
        return {t: self.asked(t, s, ("embed", s.http_port, "/embed"), size, texts) for t, s in servers.items()}

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
        """Measures one text at a time: samples by table, and samples of the engine's actual sleep."""
        turns = [asked(tokens, 1) for asked in self._asked.values()]
        before = {table: self._server(table).computed(self.bundle.model) for table in _SLEPT}
        measured = measure_round(turns if number % 2 else turns[::-1], self.say)
        samples = {}
        for table in _SLEPT:
            count, ns = (
                after - start
                for after, start in zip(self._server(table).computed(self.bundle.model), before[table], strict=True)
            )
            samples[table] = measured[f"{table} 1"]
            # Kept as a sample of its own, whose median is the engine's average time.
            engine = replace(Sample(*samples[table]), p50_ms=ns / count / 1e6, p99_ms=0.0)
            samples[_engine(table)] = astuple(engine)
        return samples

    def _served(self, table: str, rate: int) -> dict[str, float]:
        """Poisson arrivals at a rate."""
        target = Target("http", HOST, self._server(table).http_port, self.bundle.model)
        workload = Workload.of(self._texts[_TOKENS], [_TOKENS] * _TEXTS)
        drive(target, workload, even(1.0), rate / 2, 1000)
        return block(target, workload, self.options.served_s, rate, rate, good_ms=_SLO_MS)

    def _expected(self, table: str, rate: int) -> Any:  # noqa: ANN401  JSON
        return simulator.at_rate(table, _TOKENS, rate, overhead(Samples.of(self.store)))

    def _simulated(self, table: str, tokens: int, slo_ms: float) -> Any:  # noqa: ANN401  JSON
        return simulator.capacity(table, tokens, slo_ms, overhead(Samples.of(self.store)))

    def figures(self, store: Store) -> dict[str, Any]:
        samples, steps = Samples.of(store), store.steps
        simulated: dict[str, tuple[float, dict[str, Any]]] = {}
        for name, run in store.named("simulated ").items():
            table, tokens = name.split()
            simulated.setdefault(table, (run["slo_ms"], {}))[1][tokens] = run
        runs = [run for _, found in simulated.values() for run in found.values()]
        facts = [fact for run in runs for fact in run["facts"] if fact.startswith("server, ")]
        return {
            "samples": samples,
            "alone": {name: published(name, _TOKENS)[1] for name in _ALONE},
            "added": {p: [_added(samples, table, _TOKENS, f"{p}_ms") for table in _SLEPT] for p in ("p50", "p99")},
            "slept": _SLEPT,
            "simulated": simulated,
            "lengths": sorted({tokens for _, found in simulated.values() for tokens in found}, key=int),
            "server": facts[0].removeprefix("server, ") if facts else "",
            "at_rate": [
                (table, rate, steps[f"served {table} {rate}"], steps[f"expected {table} {rate}"])
                for table, rates in _RATES.items()
                for rate in (rates[0], rates[-1])
                if {f"served {table} {rate}", f"expected {table} {rate}"} <= steps.keys()
            ],
        }

    def plots(self, store: Store) -> dict[str, str]:
        tables = sorted({name.split()[0] for name in store.named("simulated ")})
        return {table.removeprefix("t4-"): _plot(store, table) for table in tables}


def _engine(table: str) -> str:
    return f"{table}, engine"


def _added(samples: Samples, table: str, tokens: int, figure: str) -> Spread:
    """Overhead of a lone text in addition to the engine, round by round, in milliseconds."""
    both = [table, _engine(table)]
    return Spread.of(samples.values(tokens, both, lambda all_of_it, engine: getattr(all_of_it, figure) - engine.p50_ms))


def overhead(samples: Samples) -> dict[str, float]:
    """Server overhead as options of `bertserve simulate`, in microseconds.

    CPU time of the server's process is split into a request part and a token part by texts of two lengths. The rest of
    the latency is the way to the engine and back, and the client. The latency of a lone request includes polling for
    its answer, so simulated rates are rather too low.
    """
    cpu = {
        tokens: statistics.median(samples.spread(tokens, table, "server_cpu_us").median for table in _SLEPT)
        for tokens in (_SHORT, _TOKENS)
    }
    token = max(0.0, (cpu[_TOKENS] - cpu[_SHORT]) / (_TOKENS - _SHORT))
    fixed = max(0.0, cpu[_SHORT] - token * _SHORT)
    added = statistics.median(1e3 * _added(samples, table, _TOKENS, "p50_ms").median for table in _SLEPT)
    parts = {name: share * fixed for name, share in _SHARES.items()}
    return {**parts, "text": 0.0, "token": token, "wire": max(0.0, added - fixed - token * _TOKENS)}


def _plot(store: Store, name: str) -> str:
    found = {step.split()[1]: run for step, run in store.named("simulated ").items() if step.split()[0] == name}
    lines = []
    for colour, (tokens, run) in zip(_COLOURS, found.items(), strict=False):
        runs = [each for each in run["runs"] if each["p99_ms"] is not None]
        p99, p50 = ([(each["offered_per_s"], each[key]) for each in runs] for key in ("p99_ms", "p50_ms"))
        lines.append(Series(f"{tokens} tokens: p99 (dots: p50)", colour, p99, p50))
    slo_ms = next(iter(found.values()))["slo_ms"]
    title, limits = f"Simulated, not measured: {name.removeprefix('t4-')} on one T4", [(slo_ms, f"{slo_ms:g} ms")]
    across, up = Axis("offered requests a second", is_log=True), Axis("ms", is_log=True)
    return as_file(title, Lines(across, up, lines, limits))
