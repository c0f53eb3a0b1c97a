"""What the server carries by itself, its engine taking no time.

The fake engine answers at once, in the engine process and over the real socket, so every stage but the computation
is there. What one server process can carry at most shows here, and what it costs where no computation hides it.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.runner import Benchmark, Page
from loadtest.benchmarks.server_process import BertServer
from loadtest.benchmarks.turns import Samples, Turn, measure_round
from loadtest.generator.child import Child
from loadtest.generator.client import GRPC
from loadtest.generator.workload import make_texts
from loadtest.report.tables import Table
from serving.host import available_cpus

if TYPE_CHECKING:
    from loadtest.benchmarks.store import Store

_TEXTS, _TOKENS = 200, 8
_CONNECTIONS = (1, 32)
_PROTOCOLS = ("HTTP", "HTTP v2", "gRPC")


class CeilingBenchmark(Benchmark):
    """The fake engine over every protocol in turns."""

    name = "ceiling"
    purpose = "what the server carries by itself, with an engine that takes no time"
    rounds = 10
    seconds = 0.5

    @cached_property
    def _turns(self) -> list[Turn]:
        bundle = self.bundle
        texts = {_TOKENS: [text.text for text in make_texts(bundle.path, _TOKENS, _TEXTS)]}
        options = ("--engine", "fake", "--fake-ms", "0")
        server = BertServer(self.options.models, self.options.precision, available_cpus(), *options)
        self.stack.enter_context(server)
        client = self.stack.enter_context(Child("loadtest.generator.client"))
        ways = (
            ("embed", server.http_port, "/embed"),
            ("v2", server.http_port, f"/v2/models/{bundle.model}/infer"),
            (GRPC, server.grpc_port, bundle.model),
        )
        turns = []
        for protocol, (form, port, endpoint) in zip(_PROTOCOLS, ways, strict=True):
            size = bundle.hidden_size
            client.ask("open", way=protocol, form=form, port=port, endpoint=endpoint, hidden_size=size, texts=texts)
            for connections in _CONNECTIONS:
                arguments = {"way": protocol, "tokens": _TOKENS, "connections": connections}
                turns.append(Turn(f"{protocol} {connections}", client, arguments, self.options.seconds, server))
        return turns

    def measure(self, number: int, tokens: int) -> dict[str, Any]:  # noqa: ARG002  every round is the same
        return measure_round(self._turns, self.say)

    def page(self, store: Store) -> Page:
        samples = Samples.of(store)
        rows = []
        for protocol in _PROTOCOLS:
            for connections in _CONNECTIONS:
                subject = f"{protocol} {connections}"
                per_s = samples.spread(_TOKENS, subject, "per_s").text(0)
                figures = {name: samples.spread(_TOKENS, subject, name) for name in ("p50_ms", "p99_ms")}
                cpu = samples.spread(_TOKENS, subject, "server_cpu_us").median
                times = (f"{spread.median:.2f}" for spread in figures.values())
                rows.append([protocol, str(connections), per_s, *times, f"{cpu:.0f}"])
        note = (
            f"Texts of {_TOKENS} tokens; medians, least to greatest in brackets. The client is one process on the same"
            " cores, so at 32 connections it and the server have a core each and the engine process shares them."
        )
        head = ("protocol", "connections", "texts/s", "p50 ms", "p99 ms", "CPU us")
        method = f"Rounds in turns ({samples.counts()}) of {store.facts['seconds']:g} s a measurement."
        table = Table("Without an engine", note, head, rows, words=1)
        return Page("What the server carries by itself", method, [table])
