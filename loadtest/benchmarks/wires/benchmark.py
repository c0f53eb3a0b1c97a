"""Empty servers side by side: what the wire costs before anything is computed.

A request of 40 bytes, a reply of 5 KB, and a handler that does nothing: our connections of HTTP and of gRPC, and the
libraries in whose place they stand. All run at once and are asked in turns; the client is one process of ours.
"""

from __future__ import annotations

import sys
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loadtest.benchmarks.peers.triton import isolated
from loadtest.benchmarks.runner import Benchmark, Option, Page
from loadtest.benchmarks.server_process import ServerProcess, free_ports
from loadtest.benchmarks.show import table
from loadtest.benchmarks.turns import Samples, Turn, measure_round
from loadtest.errors import BenchError
from loadtest.generator.child import module_environment
from loadtest.generator.client import GRPC_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadtest.benchmarks.store import Store
    from loadtest.report.sample import Spread

_INSIDE = Path(__file__).parent / "inside"
_CONNECTIONS = (1, 32)
_REPLY_BYTES = 5120
_METHOD = "/wires.Wires/Echo"
_GROUP = 0
"""Samples are grouped by tokens, and there are none here."""

_REQUEST = '{"inputs": "an empty request, 40 bytes"}'


class Subject(NamedTuple):
    """An empty server: its name in the table, the script of `inside` that runs it, and what that calls it."""

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

    own = (Option("--environment", Path("build/wires"), "of the libraries (%(default)s)"),)

    def model_facts(self) -> dict[str, str]:
        return {"model": "none"}

    @cached_property
    def _turns(self) -> list[Turn]:
        python = self.options.environment.absolute() / "bin" / "python"
        if not python.exists():
            raise BenchError(f"{self.options.environment} is no virtual environment; make it with `make bench-wires`")
        turns = []
        for subject in SUBJECTS:
            [port] = free_ports(1)
            is_ours = subject.script == "ours.py"
            command = [
                sys.executable if is_ours else str(python),
                str(_INSIDE / subject.script),
                subject.word,
                str(port),
            ]
            environment = module_environment() if is_ours else isolated({})
            server = self.opened(subject.name, partial(ServerProcess, command, environment, (port, "")))
            form, endpoint = (GRPC_BYTES, _METHOD) if subject.is_grpc else ("bytes", "/")
            way: dict[str, Any] = {"way": subject.name, "form": form, "port": port, "endpoint": endpoint}
            self.client.ask("open", hidden_size=_REPLY_BYTES, texts={_GROUP: [_REQUEST]}, **way)
            for connections in _CONNECTIONS:
                asked = {"way": subject.name, "tokens": _GROUP, "connections": connections}
                turns.append(Turn(f"{subject.name} {connections}", self.client, asked, self.options.seconds, server))
        return turns

    def measure(self, number: int, tokens: int) -> dict[str, Any]:  # noqa: ARG002  every round is the same
        return measure_round(self._turns, self.say)

    def page(self, store: Store) -> Page:
        samples = Samples.of(store)
        one, many = _CONNECTIONS

        def spread(figure: str, connections: int = many) -> Callable[[Subject], Spread]:
            return lambda subject: samples.spread(_GROUP, f"{subject.name} {connections}", figure)

        note = (
            "Medians, least to greatest in brackets. `CPU`: time of the server's process for a request; `client`: the"
            " same of the client, which shares the cores. Where a server answers as fast as the client asks, requests"
            " a second are the client's limit, and `CPU` tells servers apart."
        )
        method = (
            f"A request of {len(_REQUEST)} bytes, a reply of {_REPLY_BYTES:,}, a handler that does nothing. All servers"
            f" run at once and are asked in turns: {len(samples.rounds[_GROUP])} rounds of"
            f" {store.facts['seconds']:g} s a measurement, each after a warm-up. {samples.quiet()}. gRPC's calls share"
            " four connections at most."
        )
        servers = table(
            "Empty servers",
            note,
            SUBJECTS,
            ("server", lambda subject: subject.name),
            (f"p50 at {one}, ms", lambda subject: spread("p50_ms", one)(subject).text(3)),
            (f"requests/s at {many}", lambda subject: spread("per_s")(subject).text(0)),
            (f"CPU at {many}, us", lambda subject: spread("server_cpu_us")(subject).text(0)),
            ("client, us", lambda subject: f"{spread('client_cpu_us')(subject).median:.0f}"),
            words=1,
        )
        return Page("What the wire costs", method, [servers])
