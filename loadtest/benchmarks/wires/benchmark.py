"""Empty servers side by side: the cost of the wire before anything is computed.

Our HTTP and gRPC connections, and the libraries that they replace. All servers run at once and are measured in turns;
the client is one process of ours.
"""

from __future__ import annotations

import sys
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.runner import Benchmark, Option
from loadtest.benchmarks.server_process import ServerProcess, free_ports, isolated
from loadtest.benchmarks.turns import Samples, Turn
from loadtest.errors import BenchError
from loadtest.generator.child import module_environment
from loadtest.generator.client import GRPC_BYTES

if TYPE_CHECKING:
    from loadtest.benchmarks.store import Store

_INSIDE = Path(__file__).parent / "inside"
_CONNECTIONS = (1, 32)
_REPLY_BYTES = 5120
_HTTP, _GRPC = ("bytes", "/"), (GRPC_BYTES, "/wires.Wires/Echo")
_REQUEST = '{"inputs": "an empty request, 40 bytes"}'
_SUBJECTS = {
    "ours: HTTP/1.1 on httptools, hot route": ("ours.py", "http", _HTTP),
    "uvicorn + httptools, bare ASGI": ("libraries.py", "asgi", _HTTP),
    "uvicorn, FastAPI with a pydantic body": ("libraries.py", "fastapi", _HTTP),
    "ours: gRPC on hpack": ("ours.py", "grpc", _GRPC),
    "grpc.aio": ("libraries.py", "grpc-aio", _GRPC),
    "grpclib": ("libraries.py", "grpclib", _GRPC),
}
"""Scripts of `inside`: name of the script, its argument, and the client's form."""


class WiresBenchmark(Benchmark):
    """Every empty server in turns."""

    name = "wires"
    purpose = "Compare the HTTP and gRPC stacks with other libraries, with a no-op engine."
    rounds = 10
    seconds = 1.0
    length = 0  # samples are grouped by tokens, and there are none here
    own = (
        Option("--environment", Path("build/wires"), "Virtual environment of the libraries (default: %(default)s)."),
    )

    def model_facts(self) -> dict[str, str]:
        return {"model": "none"}

    @cached_property
    def _turns(self) -> list[Turn]:
        python = self.options.environment.absolute() / "bin" / "python"
        if not python.exists():
            raise BenchError(f"{self.options.environment} is no virtual environment; make it with `make bench-wires`")
        turns = []
        for name, (script, word, (form, endpoint)) in _SUBJECTS.items():
            [port] = free_ports(1)
            is_ours = script == "ours.py"
            command = [sys.executable if is_ours else str(python), str(_INSIDE / script), word, str(port)]
            environment = module_environment() if is_ours else isolated({})
            server = self.opened(name, partial(ServerProcess, command, environment, (port, "")))
            asked = self.asked(name, server, (form, port, endpoint), _REPLY_BYTES, {self.length: [_REQUEST]})
            turns += [asked(self.length, connections) for connections in _CONNECTIONS]
        return turns

    def turns(self, tokens: int) -> list[Turn]:  # noqa: ARG002  there are none
        return self._turns

    def figures(self, store: Store) -> dict[str, Any]:
        return {"samples": Samples.of(store), "subjects": list(_SUBJECTS), "request": len(_REQUEST)}
