"""Servers under test, started on free ports and ended in every case."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bertserve.loadtest.benchmarks.processes import cpu_s, descendants, resident_bytes, runs
from bertserve.loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

HOST = "127.0.0.1"
_END_LIMIT_S = 15.0
_POLL_S = 0.02
_GRACE_S = 0.5
_LOG_LINES = 8
_FRONT = "bertserve.serving.fronts.front"


@dataclass(slots=True, frozen=True)
class Usage:
    """CPU time in seconds, or memory in bytes, of the server process, its engine processes and its front processes."""

    server: float
    engine: float
    fronts: float

    @property
    def all(self) -> float:
        return self.server + self.engine + self.fronts


class ServerProcess:
    """A server in a process of its own, started on free ports; leaving its `with` block ends it.

    Attributes:
        command: Its command line.
        http_port: Its HTTP port.
        grpc_port: Its gRPC port; 0 if it has none.
        ready_s: Seconds from starting the process until it was ready.
        start_limit_s: Maximum of `ready_s`: reading a large model and timing its batches takes minutes.
    """

    start_limit_s = 600.0

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        ready: tuple[int, str],
        folder: Path | None = None,
    ) -> None:
        """Prepares a command; entering the block starts it.

        Args:
            command: Its command line.
            environment: Its whole environment.
            ready: The port, and the path that answers 200 once it is ready; without a path an open port is enough.
            folder: Working directory; None for this process's.
        """
        self.http_port, self.grpc_port, self.ready_s = ready[0], 0, 0.0
        self.command = command
        self._environment = environment
        self._ready = ready
        self._folder = folder

    def __enter__(self) -> Self:
        """Starts it and waits until it is ready.

        Raises:
            BenchError: It does not become ready; the message ends with the end of its log.
        """
        self._log = tempfile.TemporaryFile()
        started = time.perf_counter()
        said: dict[str, Any] = {"stdout": self._log, "stderr": subprocess.STDOUT}
        place: dict[str, Any] = {"env": self._environment, "cwd": self._folder}
        # Its own session: Ctrl-C reaches the benchmark alone, which then ends the server in order.
        self._process = subprocess.Popen(self.command, start_new_session=True, **said, **place)
        try:
            self._wait_until_ready(started)
        except BaseException:
            self._end()
            raise
        self.ready_s = time.perf_counter() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def pids(self) -> list[int]:
        """Its processes, the first one in front."""
        return [self._process.pid, *descendants(self._process.pid)]

    def cpu_s(self) -> Usage:
        """CPU time used so far, in seconds."""
        return self._usage(cpu_s)

    def memory_bytes(self) -> Usage:
        """Resident memory."""
        return self._usage(resident_bytes)

    def last_words(self) -> str:
        """The end of its log, and its exit code if it has ended: the explanation of a failed measurement."""
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()[-_LOG_LINES:]
        # A broken connection is seen slightly before the end of the process that caused it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            lines.append(f"(the server has ended, exit code {self._process.wait(_GRACE_S)})")
        return "\n".join(lines)

    def _usage(self, figure: Callable[[int], float]) -> Usage:
        children = descendants(self._process.pid)
        fronts = {pid for pid in children if runs(pid, _FRONT)}
        engine = sum(figure(pid) for pid in children if pid not in fronts)
        return Usage(figure(self._process.pid), engine, sum(map(figure, fronts)))

    def _wait_until_ready(self, started: float) -> None:
        while not _answers(*self._ready):
            if self._process.poll() is not None or time.perf_counter() - started > self.start_limit_s:
                raise BenchError(f"the server did not become ready:\n{self.last_words()}")
            time.sleep(_POLL_S)

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class BertServer(ServerProcess):
    """`bertserve serve`."""

    def __init__(self, models: Path, precision: str, threads: int, *options: str) -> None:
        """Serves a model repository with this many cores for the engine, and more options."""
        http_port, grpc_port, self.metrics_port = free_ports(3)
        command = [
            str(program()),
            *("serve", "--models", str(models), "--precision", precision, "--threads", str(threads)),
            *("--host", HOST, "--http-port", str(http_port), "--grpc-port", str(grpc_port)),
            # The bundle of `find_bundle`; later options win.
            *("--metrics-port", str(self.metrics_port), "--lame-duck-s", "0", "--engine", "ort-cpu", *options),
        ]
        # Defaults are measured, not settings from this shell.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BERTSERVE_")}
        super().__init__(command, environment, (self.metrics_port, "/readyz"))
        self.http_port, self.grpc_port = http_port, grpc_port

    def get(self, path: str) -> Any:  # noqa: ANN401  JSON
        """Its answer at a path over HTTP."""
        return json.loads(get(self.http_port, path)[1])

    def computed(self, model: str) -> tuple[int, int]:
        """Texts that the engine has computed, and the nanoseconds that it took."""
        [found] = self.get(f"/v2/models/{model}/stats")["model_stats"]
        return found["inference_stats"]["compute_infer"]["count"], found["inference_stats"]["compute_infer"]["ns"]


def get(port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a reply over HTTP; raises OSError and HTTPException."""
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read()


def isolated(variables: dict[str, str]) -> dict[str, str]:
    """This process's environment plus these variables, except `PYTHONPATH`: another Python must not find us."""
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **variables}


def program() -> Path:
    """The program `bertserve` of this interpreter's environment.

    Raises:
        BenchError: There is none.
    """
    # Not resolved: in a virtual environment the interpreter is a link to outside.
    found = Path(sys.executable).parent / "bertserve"
    if not found.exists():
        raise BenchError(f"there is no {found}: install the project into the environment of this interpreter")
    return found


def free_ports(count: int) -> list[int]:
    """Free ports below the range that systems give to outgoing connections, which could take one first."""
    ports: list[int] = []
    for port in random.sample(range(10_000, 20_000), 1_000):
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise BenchError(f"fewer than {count} free ports between 10000 and 20000")


def _answers(port: int, path: str) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        if path:
            return get(port, path)[0] == http.HTTPStatus.OK
        with socket.create_connection((HOST, port), 1):
            return True
    return False
