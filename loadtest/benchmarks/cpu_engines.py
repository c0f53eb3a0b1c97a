"""The engines for CPUs side by side: whether `cpu` is as good as the better of ONNX Runtime and OpenVINO alone."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import cached_property
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.runner import Benchmark, Page
from loadtest.benchmarks.server_process import BertServer
from loadtest.benchmarks.turns import Samples, Turn, measure_round
from loadtest.generator.child import Child
from loadtest.generator.workload import make_texts
from loadtest.report.sample import Spread
from loadtest.report.tables import Table
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadtest.benchmarks.store import Step, Store

ALONE = ("ort-cpu", "openvino")
ENGINES = (*ALONE, "cpu")
CONNECTIONS = (1, 32)

ASKED_PER_S, ASKED_P50, ASKED_START_S, ASKED_MB = 0.98, 1.02, 4.0, 600.0
"""Of `cpu` beside the better one: texts a second, p50; seconds to READY, memory of the whole server."""

_TEXTS = 200
_STARTS = 3
_MEMORY_S = 0.2
_EVERY_LENGTH = range(8, 257, 8)
_MEMORY = ("at READY", "after these lengths", f"after every eighth length to {_EVERY_LENGTH[-1]}")


class CpuEnginesBenchmark(Benchmark):
    """Three servers over one bundle, in turns."""

    name = "cpu-engines"
    purpose = "the engine `cpu` beside ONNX Runtime and OpenVINO alone: latency, throughput, start, memory"
    rounds = 10
    seconds = 0.4
    tokens = (8, 32, 128)
    precision = "int8"

    def facts(self) -> dict[str, Any]:
        """The version of the library that not all share, too."""
        return {**super().facts(), "openvino": version("openvino")}

    def steps(self) -> Iterator[Step]:
        yield "starts", self._starts
        yield "memory", self._memory
        yield from super().steps()

    @cached_property
    def _cache(self) -> Path:
        return Path(self.stack.enter_context(tempfile.TemporaryDirectory()))

    def _server(self, engine: str) -> BertServer:
        options = ("--engine", engine, "--cache-dir", str(self._cache / engine))
        return BertServer(self.options.models, self.options.precision, available_cpus(), *options)

    def _starts(self) -> dict[str, list[float]]:
        """Seconds to READY by engine: with an empty cache, then with what that start has put there."""
        seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        for number in range(1 + _STARTS):
            for engine, times in seconds.items():
                self.say(f"start {number + 1}, {engine}")
                with self._server(engine) as server:
                    times.append(server.ready_s)
        return seconds

    def _memory(self) -> dict[str, list[float]]:
        """MB of each server, all processes together, with the machine to itself: at `_MEMORY`'s moments."""
        memory: dict[str, list[float]] = {}
        for engine in ENGINES:
            self.say(f"memory, {engine}")
            with ExitStack() as stack:
                server = stack.enter_context(self._server(engine))
                memory[engine] = [server.proportional_bytes() / 1e6]
                for lengths in (self.options.tokens, _EVERY_LENGTH):
                    client = self._client(stack, engine, server, lengths)
                    for tokens, connections in product(lengths, CONNECTIONS):
                        arguments = {"tokens": tokens, "way": engine, "connections": connections, "warm_up_s": 0}
                        client.ask("measure", seconds=_MEMORY_S, **arguments)
                    memory[engine].append(server.proportional_bytes() / 1e6)
        return memory

    @cached_property
    def _servers(self) -> dict[str, BertServer]:
        return {engine: self.stack.enter_context(self._server(engine)) for engine in ENGINES}

    @cached_property
    def _clients(self) -> dict[str, Child]:
        lengths = self.options.tokens
        return {engine: self._client(self.stack, engine, server, lengths) for engine, server in self._servers.items()}

    def _client(self, stack: ExitStack, engine: str, server: BertServer, lengths: Sequence[int]) -> Child:
        client = stack.enter_context(Child("loadtest.generator.client"))
        texts = {n: [text.text for text in make_texts(self.bundle.path, n, _TEXTS)] for n in lengths}
        port, size = server.http_port, self.bundle.hidden_size
        client.ask("open", way=engine, form="ours", port=port, endpoint="/embed", hidden_size=size, texts=texts)
        return client

    def measure(self, number: int, tokens: int) -> dict[str, Any]:
        clients, turns = self._clients, []
        for connections in CONNECTIONS:
            # Who goes first changes from round to round: a host that slows down would always meet the last one.
            for engine in ENGINES if number % 2 else ENGINES[::-1]:
                arguments = {"tokens": tokens, "way": engine, "connections": connections}
                server = self._servers[engine]
                turns.append(Turn(f"{engine} {connections}", clients[engine], arguments, self.options.seconds, server))
        return measure_round(turns, self.say)

    def page(self, store: Store) -> Page:
        samples = Samples.of(store)
        note = (
            f"Over `/embed`, {store.facts['seconds']:g} s a measurement, in turns ({samples.counts()}); medians, and in"
            " the last column what `cpu` takes or carries beside the better one of the two in the same round, quartiles"
            " in brackets."
        )
        head = ("tokens", "connections", *ENGINES, "beside the better one")
        cells = [_Cell(samples, tokens, connections) for tokens in samples.rounds for connections in CONNECTIONS]
        tables = [
            Table("ONNX Runtime, OpenVINO and the best of both", note, head, [cell.row() for cell in cells], words=1)
        ]
        verdicts = [
            _verdict("p50 at 1 connection beside the better one", [cell for cell in cells if cell.is_lone], ASKED_P50),
            _verdict("texts a second at 32", [cell for cell in cells if not cell.is_lone], ASKED_PER_S),
        ]
        starts, memory = store.steps.get("starts"), store.steps.get("memory")
        if starts and memory:
            warm = {name: Spread.of(starts[name][1:]) for name in ENGINES}
            rows = [
                [
                    name,
                    f"{starts[name][0]:.1f} s",
                    warm[name].text(1),
                    *(f"{size_mb:.0f} MB" for size_mb in memory[name]),
                ]
                for name in ENGINES
            ]
            columns = ("engine", "first start", "next starts, s", *_MEMORY)
            words = "Memory is that of all processes of a server, at 1 and at 32 connections; shared pages count once."
            tables.append(Table("Start to READY, and memory", words, columns, rows, words=1))
            ready_s, sizes_mb = warm["cpu"].median, memory["cpu"]
            shown = ", ".join(f"{size_mb:.0f} MB {when}" for size_mb, when in zip(sizes_mb, _MEMORY, strict=True))
            verdicts += [
                f"READY after {ready_s:.1f} s ({ASKED_START_S:g} asked: {_yes(ready_s <= ASKED_START_S)})",
                f"{shown} ({ASKED_MB:g} asked: {_yes(max(sizes_mb) <= ASKED_MB)})",
            ]
        facts = {"openvino": store.facts["openvino"]}
        return Page("The engines for CPUs", "", tables, f"**`cpu`: {'; '.join(verdicts)}.**", facts)


class _Cell:
    """The engines at one length: p50 at one connection, texts a second at more."""

    def __init__(self, samples: Samples, tokens: int, connections: int) -> None:
        self.is_lone = connections == 1
        self._key = [str(tokens), str(connections)]
        figure, better = ("p50_ms", min) if self.is_lone else ("per_s", max)
        subjects = [f"{engine} {connections}" for engine in ENGINES]
        self._medians = {subject: samples.spread(tokens, subject, figure).median for subject in subjects}
        best = better(subjects[: len(ALONE)], key=lambda subject: self._medians[subject])
        ratios = samples.ratios(tokens, subjects[-1], best, figure)
        self.spread = Spread.quartiles(ratios) if len(ratios) > 1 else Spread.of(ratios)

    def row(self) -> list[str]:
        shown = [f"{value:.2f} ms" if self.is_lone else f"{value:.0f}/s" for value in self._medians.values()]
        return [*self._key, *shown, self.spread.text(2)]


def _verdict(what: str, cells: Sequence[_Cell], asked: float) -> str:
    ratios = [cell.spread.median for cell in cells]
    kept = max(ratios) <= asked if cells[0].is_lone else min(ratios) >= asked
    limit = "at most" if cells[0].is_lone else "at least"
    return f"{what} {' / '.join(f'{ratio:.2f}' for ratio in ratios)} ({limit} {asked:g} asked: {_yes(kept)})"


def _yes(kept: bool) -> str:  # noqa: FBT001  a word for it
    return "yes" if kept else "no"
