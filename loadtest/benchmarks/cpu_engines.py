"""The engines for CPUs side by side: whether `cpu` is as good as the better of ONNX Runtime and OpenVINO alone."""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.runner import Benchmark, Page
from loadtest.benchmarks.server_process import BertServer
from loadtest.benchmarks.turns import Samples, Turn, measure_round
from loadtest.generator.child import Child
from loadtest.generator.workload import make_texts
from loadtest.report.machine import usable_cores
from loadtest.report.sample import Spread
from loadtest.report.tables import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.benchmarks.store import Step, Store

ALONE = ("ort-cpu", "openvino")
ENGINES = (*ALONE, "cpu")
CONNECTIONS = (1, 32)

_TEXTS = 200
_STARTS = 3


class CpuEnginesBenchmark(Benchmark):
    """Three servers over one bundle, in turns."""

    name = "cpu-engines"
    purpose = "the engine `cpu` beside ONNX Runtime and OpenVINO alone: latency, throughput, start, memory"
    rounds = 10
    seconds = 0.4
    tokens = (8, 32, 128)

    def __init__(self, options: Any) -> None:  # noqa: ANN401  argparse
        """As `Benchmark`; the engines run the INT8 artifacts."""
        super().__init__(options)
        options.precision = "int8"

    def steps(self) -> Iterator[Step]:
        yield "starts", self._starts
        yield from super().steps()
        yield "memory", self._memory

    @cached_property
    def _cache(self) -> Path:
        return Path(self.stack.enter_context(tempfile.TemporaryDirectory()))

    def _server(self, engine: str) -> BertServer:
        options = ("--engine", engine, "--cache-dir", str(self._cache / engine))
        return BertServer(self.options.models, self.options.precision, usable_cores(), *options)

    def _starts(self) -> dict[str, list[float]]:
        """Seconds to READY by engine: with an empty cache, then with what that start has put there."""
        seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        for number in range(1 + _STARTS):
            for engine, times in seconds.items():
                self.say(f"start {number + 1}, {engine}")
                with self._server(engine) as server:
                    times.append(server.ready_s)
        return seconds

    @cached_property
    def _servers(self) -> dict[str, BertServer]:
        return {engine: self.stack.enter_context(self._server(engine)) for engine in ENGINES}

    @cached_property
    def _clients(self) -> dict[str, Child]:
        bundle, clients = self.bundle, {}
        texts = {n: [text.text for text in make_texts(bundle.path, n, _TEXTS)] for n in self.options.tokens}
        for engine, server in self._servers.items():
            client = clients[engine] = self.stack.enter_context(Child("loadtest.generator.client"))
            port, size = server.http_port, bundle.hidden_size
            client.ask("open", way=engine, form="ours", port=port, endpoint="/embed", hidden_size=size, texts=texts)
        return clients

    def measure(self, number: int, tokens: int) -> dict[str, Any]:
        clients, turns = self._clients, []
        for connections in CONNECTIONS:
            # Who goes first changes from round to round: a host that slows down would always meet the last one.
            for engine in ENGINES if number % 2 else ENGINES[::-1]:
                arguments = {"tokens": tokens, "way": engine, "connections": connections}
                server = self._servers[engine]
                turns.append(Turn(f"{engine} {connections}", clients[engine], arguments, self.options.seconds, server))
        return measure_round(turns, self.say)

    def _memory(self) -> dict[str, float]:
        """MB of each server, its engine process included, after the load."""
        usages = {engine: server.memory_bytes() for engine, server in self._servers.items()}
        return {engine: (usage.server + usage.engine) / 1e6 for engine, usage in usages.items()}

    def page(self, store: Store) -> Page:
        samples = Samples.of(store)
        note = (
            f"Over `/embed`, {store.facts['seconds']:g} s a measurement, in turns ({samples.counts()}); medians, and in"
            " the last column what `cpu` takes or carries beside the better one of the two in the same round, quartiles"
            " in brackets."
        )
        head = ("tokens", "connections", *ENGINES, "beside the better one")
        rows = [_row(samples, tokens, connections) for tokens in samples.rounds for connections in CONNECTIONS]
        tables = [Table("ONNX Runtime, OpenVINO and the best of both", note, head, rows, words=1)]
        starts, memory = store.steps.get("starts"), store.steps.get("memory")
        if starts and memory:
            rows = [
                [name, f"{starts[name][0]:.1f} s", Spread.of(starts[name][1:]).text(1), f"{memory[name]:.0f} MB"]
                for name in ENGINES
            ]
            columns = ("engine", "first start", "next starts, s", "resident after the load")
            tables.append(Table("Start to READY, and memory of server and engine process", "", columns, rows, words=1))
        return Page("The engines for CPUs", "", tables)


def _row(samples: Samples, tokens: int, connections: int) -> list[str]:
    """The p50 at one connection, texts a second at more."""
    figure, better = ("p50_ms", min) if connections == 1 else ("per_s", max)
    subjects = [f"{engine} {connections}" for engine in ENGINES]
    medians = {subject: samples.spread(tokens, subject, figure).median for subject in subjects}
    best = better(subjects[: len(ALONE)], key=lambda subject: medians[subject])
    ratios = samples.ratios(tokens, subjects[-1], best, figure)
    spread = Spread.quartiles(ratios) if len(ratios) > 1 else Spread.of(ratios)
    shown = [f"{value:.2f} ms" if connections == 1 else f"{value:.0f}/s" for value in medians.values()]
    return [str(tokens), str(connections), *shown, spread.text(2)]
