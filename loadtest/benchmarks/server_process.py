"""Servers under test: started on free ports, ended whatever happens."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from loadtest.benchmarks.processes import cpu_s, descendants, proportional_bytes, resident_bytes
from loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

HOST = "127.0.0.1"
_START_LIMIT_S = 600.0
"""A large model is read, and its batches timed, for minutes."""
_END_LIMIT_S = 15.0
_POLL_S = 0.02
_GRACE_S = 0.5
_LOG_LINES = 8
_SOFT_DESCRIPTORS = 1024


@dataclass(slots=True, frozen=True)
class Usage:
    """What the server process and its engine processes have, in seconds or bytes."""

    server: float
    engine: float

    @property
    def all(self) -> float:
        return self.server + self.engine


class ServerProcess:
    """A server in a process of its own, started on free ports; leaving its `with` block ends it.

    Attributes:
        ready_s: Seconds from starting the process until it was ready.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        ready: tuple[int, str],
        folder: Path | None = None,
        log: Path | None = None,
    ) -> None:
        """Says what to run.

        Args:
            command: The words of the command.
            environment: All of its environment.
            ready: The port and the path that answer 200 once it is ready; without a path the port answers.
            folder: Where it runs; None: where this process does.
            log: What its output is added to; None: a file that nobody sees.
        """
        self.ready_s = 0.0
        self._command = command
        self._environment = environment
        self._ready = ready
        self._folder = folder
        self._kept = log

    def __enter__(self) -> Self:
        """Starts it and waits until it is ready.

        Raises:
            BenchError: It does not become ready; the message ends with its last words.
        """
        self._log = self._kept.open("a+b") if self._kept else tempfile.TemporaryFile()
        started = time.perf_counter()
        # Its own session: Ctrl-C reaches the benchmark alone, which then ends the server in order.
        self._process = subprocess.Popen(
            self._command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self._environment,
            cwd=self._folder,
            start_new_session=True,
        )
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
        """Ends it."""
        self._end()

    def stop(self, limit_s: float) -> int:
        """SIGTERM, and the exit code that follows.

        Raises:
            BenchError: It does not end in time.
        """
        self._process.terminate()
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise BenchError(f"the server did not end within {limit_s:g} s of SIGTERM:\n{self.last_words()}") from None

    def pids(self) -> list[int]:
        """Its processes, the first one in front."""
        return [self._process.pid, *descendants(self._process.pid)]

    def cpu_s(self) -> Usage:
        """CPU time used so far, in seconds."""
        return Usage(cpu_s(self._process.pid), sum(cpu_s(pid) for pid in descendants(self._process.pid)))

    def memory_bytes(self) -> Usage:
        """Resident memory."""
        engines = descendants(self._process.pid)
        return Usage(resident_bytes(self._process.pid), sum(resident_bytes(pid) for pid in engines))

    def proportional_bytes(self) -> int:
        """Resident memory of all its processes; a page that several processes share counts for each in part."""
        return sum(map(proportional_bytes, self.pids()))

    def log_lines(self) -> int:
        """How many lines its log has so far."""
        log = self._log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).count(b"\n")

    def last_words(self) -> str:
        """The end of its log, and its exit code if it has ended: what explains a failed measurement."""
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()[-_LOG_LINES:]
        # A broken connection is seen a little earlier than the end of the process that caused it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            lines.append(f"(the server has ended, exit code {self._process.wait(_GRACE_S)})")
        return "\n".join(lines)

    def _wait_until_ready(self, started: float) -> None:
        while not _answers(*self._ready):
            if self._process.poll() is not None or time.perf_counter() - started > _START_LIMIT_S:
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
    """`bertserve serve`.

    Attributes:
        http_port: Its port of HTTP.
        grpc_port: Its port of gRPC.
        grpc_target: Its `host:port` of gRPC.
    """

    def __init__(self, models: Path, precision: str, threads: int, *options: str) -> None:
        """Says what to serve.

        Args:
            models: A model repository.
            precision: As `bertserve serve --precision` has it.
            threads: Cores of its engine.
            *options: More words of the command line.
        """
        self.http_port, grpc_port, probe_port = free_ports(3)
        self.grpc_port = grpc_port
        self.grpc_target = f"{HOST}:{grpc_port}"
        command = [
            str(program()),
            *("serve", "--models", str(models), "--precision", precision, "--threads", str(threads)),
            *("--host", HOST, "--http-port", str(self.http_port), "--grpc-port", str(grpc_port)),
            # What `find_bundle` describes; later words win.
            *("--metrics-port", str(probe_port), "--lame-duck-s", "0", "--engine", "ort-cpu", *options),
        ]
        # What is measured are the defaults, not what this shell happens to set.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BERTSERVE_")}
        super().__init__(command, environment, (probe_port, "/readyz"))

    def get(self, path: str) -> Any:  # noqa: ANN401  JSON
        """What it answers at a path over HTTP."""
        connection = http.client.HTTPConnection(HOST, self.http_port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())


def program() -> Path:
    """The program `bertserve` of this interpreter's environment.

    Raises:
        BenchError: There is none.
    """
    # Not resolved: in a virtual environment the interpreter is a link out of it.
    found = Path(sys.executable).parent / "bertserve"
    if not found.exists():
        raise BenchError(f"there is no {found}: install the project into the environment of this interpreter")
    return found


@contextlib.contextmanager
def few_descriptors() -> Iterator[None]:
    """What is started in this block has the soft limit of descriptors that a login has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_SOFT_DESCRIPTORS, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, below those that systems give to connections, which could take one first."""
    ports: list[int] = []
    for port in random.sample(range(10_000, 20_000), 1_000):
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise BenchError(f"fewer than {count} free ports between 10000 and 20000")


def _answers(port: int, path: str) -> bool:
    if not path:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
            return True
        return False
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
