"""Empty servers side by side: what the wire costs before anything is computed.

A request of 40 bytes, a reply of 5 KB, and a handler that does nothing: our connections of HTTP and of gRPC, and the
libraries in whose place they stand. All run at once and are asked in turns; the client is one process of ours.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.peers.triton import isolated
from loadtest.benchmarks.runner import Benchmark, Page
from loadtest.benchmarks.server_process import ServerProcess, free_ports
from loadtest.benchmarks.turns import Samples, Turn, measure_round
from loadtest.errors import BenchError
from loadtest.generator.child import Child, module_environment
from loadtest.generator.client import GRPC_BYTES
from loadtest.report.tables import Table

if TYPE_CHECKING:
    import argparse

    from loadtest.benchmarks.store import Store

_INSIDE = Path(__file__).parent / "inside"
_CONNECTIONS = (1, 32)
_REPLY_BYTES = 5120
_METHOD = "/wires.Wires/Echo"
_GROUP = 0
"""Samples are grouped by tokens, and there are none here."""

_REQUEST = '{"inputs": "an empty request, 40 bytes"}'


@dataclass(slots=True, frozen=True)
class Subject:
    """An empty server.

    Attributes:
        name: In the table.
        script: What runs it, one of `inside`.
        word: What the script calls it.
        is_grpc: Whether it speaks gRPC; else HTTP/1.1.
    """

    name: str
    script: str
    word: str
    is_grpc: bool = False


SUBJECTS = (
    Subject("ours: HTTP/1.1 on httptools, hot route", "ours.py", "http"),
    Subject("uvicorn + httptools, bare ASGI", "libraries.py", "asgi"),
    Subject("uvicorn, Starlette route", "libraries.py", "starlette"),
    Subject("uvicorn, FastAPI, Request in, Response out", "libraries.py", "fastapi"),
    Subject("uvicorn, FastAPI with a pydantic body", "libraries.py", "fastapi-body"),
    Subject("ours: gRPC on hpack", "ours.py", "grpc", is_grpc=True),
    Subject("grpc.aio", "libraries.py", "grpc-aio", is_grpc=True),
    Subject("grpcio, threads", "libraries.py", "grpc-threads", is_grpc=True),
    Subject("grpclib", "libraries.py", "grpclib", is_grpc=True),
)


class WiresBenchmark(Benchmark):
    """Every empty server in turns."""

    name = "wires"
    purpose = "empty servers: our HTTP and gRPC connections beside the libraries that they replace"
    rounds = 10
    seconds = 1.0
    length = _GROUP

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> tuple[str, ...]:
        environment = Path("build/wires")
        parser.add_argument("--environment", type=Path, default=environment, help="of the libraries (%(default)s)")
        return ()

    def model_facts(self) -> dict[str, str]:
        return {"model": "none"}

    @cached_property
    def _turns(self) -> list[Turn]:
        python = self.options.environment.absolute() / "bin" / "python"
        if not python.exists():
            raise BenchError(f"{self.options.environment} is no virtual environment; make it with `make bench-wires`")
        client = self.stack.enter_context(Child("loadtest.generator.client"))
        turns = []
        for subject in SUBJECTS:
            self.say(f"starting {subject.name}")
            [port] = free_ports(1)
            is_ours = subject.script == "ours.py"
            command = [
                sys.executable if is_ours else str(python),
                str(_INSIDE / subject.script),
                subject.word,
                str(port),
            ]
            environment = module_environment() if is_ours else isolated({})
            server = self.stack.enter_context(ServerProcess(command, environment, (port, "")))
            form, endpoint = (GRPC_BYTES, _METHOD) if subject.is_grpc else ("bytes", "/")
            way: dict[str, Any] = {"way": subject.name, "form": form, "port": port, "endpoint": endpoint}
            client.ask("open", hidden_size=_REPLY_BYTES, texts={_GROUP: [_REQUEST]}, **way)
            for connections in _CONNECTIONS:
                arguments = {"way": subject.name, "tokens": _GROUP, "connections": connections}
                turns.append(Turn(f"{subject.name} {connections}", client, arguments, self.options.seconds, server))
        return turns

    def measure(self, number: int, tokens: int) -> dict[str, Any]:  # noqa: ARG002  every round is the same
        return measure_round(self._turns, self.say)

    def page(self, store: Store) -> Page:
        samples = Samples.of(store)
        one, many = _CONNECTIONS
        rows = [
            [
                subject.name,
                samples.spread(_GROUP, f"{subject.name} {one}", "p50_ms").text(3),
                samples.spread(_GROUP, f"{subject.name} {many}", "per_s").text(0),
                samples.spread(_GROUP, f"{subject.name} {many}", "server_cpu_us").text(0),
                f"{samples.spread(_GROUP, f'{subject.name} {many}', 'client_cpu_us').median:.0f}",
            ]
            for subject in SUBJECTS
        ]
        note = (
            "Medians, least to greatest in brackets. `CPU`: time of the server's process for a request; `client`: the"
            " same of the client, which shares the cores. Where a server answers as fast as the client asks, requests"
            " a second are the client's limit, and `CPU` tells servers apart."
        )
        head = ("server", f"p50 at {one}, ms", f"requests/s at {many}", f"CPU at {many}, us", "client, us")
        method = (
            f"A request of {len(_REQUEST)} bytes, a reply of {_REPLY_BYTES:,}, a handler that does nothing. All servers"
            f" run at once and are asked in turns: {len(samples.rounds[_GROUP])} rounds of"
            f" {store.facts['seconds']:g} s a measurement, each after a warm-up. {samples.quiet()}. gRPC's calls share"
            " four connections at most."
        )
        return Page("What the wire costs", method, [Table("Empty servers", note, head, rows, words=1)])
