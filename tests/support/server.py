"""A real server in a process of its own, on free ports."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.support.certificates import Secured
from tests.support.fork_server import ENGINE, fork_server
from tests.support.models import ROOT, demo_repository, light_repository
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.support.certificates import Certificates
    from tests.support.fork_server import ForkedProcess

START_LIMIT_S = 60.0
_STOP_LIMIT_S = 30.0
_LOG_TAIL = 30

PATIENT = ("--default-timeout-ms", "30000")
"""Of every server, unless its test says otherwise: the deadline of a request that names none."""
FAKE = ("--engine", "fake", "--precision", "fp32", *PATIENT)
"""Settings of a server whose engine answers `fake_vector` at once."""
IMPATIENT = (*FAKE, "--keep-alive-s", "2")
"""The same of one that waits only briefly for idle clients."""
ONE_AT_A_TIME = ("--engine", "fake", "--precision", "fp32", "--threads", "1", "--max-batch-tokens", "16")
"""Settings of one that computes one text at a time."""

MEASURED = ("--cache-dir", str(ROOT / "build" / "test-node"))
"""Of one that need not measure what its models cost where an earlier one has: that takes seconds of all cores."""


def measured(models: Path, *options: str) -> tuple[str, ...]:
    """The same for bundles whose names others have; `options` are among what is returned, as costs depend on some."""
    manifests = [file.read_bytes() for file in sorted(models.glob("*/*/manifest.json"))]
    key = hashlib.sha256(b"".join([*manifests, *map(str.encode, options)])).hexdigest()[:16]
    return (*options, "--cache-dir", str(ROOT / "build" / "test-node" / key))


_ANNOUNCED = re.compile(
    r"bertserve is ready.*?HTTP +https?://(?P<http>\S+).*?gRPC +(?P<grpc>\S+).*?metrics +http://(?P<metrics>\S+)/metrics",
    re.DOTALL,
)

RUNNING: list[Server] = []
"""Every server that is up, oldest first; a failing test shows the ends of their logs."""


SLOW_ENGINES = {"PYTHONPATH": str(Path(__file__).with_name("slow_engines"))}
"""Environment in which engines take two seconds longer to start."""

FROM_SOURCE = (sys.executable, "-m", "bertserve")
"""The program that the working tree is."""


def command(*options: str, program: Sequence[str] = FROM_SOURCE) -> list[str]:
    return [*program, "serve", *options]


EVERY_SERVER: dict[str, str] = {}
"""Environment of every server, unless its test or its options say otherwise."""


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment without settings for the server, with `EVERY_SERVER` and `extra`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTSERVE_")}
    return kept | EVERY_SERVER | (extra or {})


def refused_start(
    *options: str,
    env: dict[str, str] | None = None,
    timeout_s: float = START_LIMIT_S,
    files: tuple[int, int] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a server that is expected to end by itself; `files` as `Server` takes it."""
    return fork_server().run(["serve", *options], environment(env), ROOT, timeout_s, files)


def starts_warm(program: Sequence[str], env: dict[str, str]) -> bool:
    """Whether a fork of a process that has imported the server is the same as a start of this program."""

    def looked_at(variables: Mapping[str, str]) -> dict[str, str]:
        """What Python reads at its start and the fork server does not."""
        return {name: value for name, value in variables.items() if name.startswith("PYTHON") and name != "PYTHONPATH"}

    return program == FROM_SOURCE and looked_at(os.environ) == looked_at(env)


_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10
_PORTS = itertools.cycle(random.sample(range(20_000 + 1_000 * _WORKER, 21_000 + 1_000 * _WORKER), 1_000))


def free_port() -> int:
    """A port that nothing listens on now, and that is given to nobody else before a server opens it.

    It lies below the range from which Linux takes the ports of connections that other tests make meanwhile, and each
    test process has a range of its own.
    """
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable: the ports repeat")


class Server:
    """`bertserve serve` as a subprocess; use it in a `with` block."""

    def __init__(
        self,
        models: Path | None,
        *options: str,
        env: dict[str, str] | None = None,
        wait_ready: bool = True,
        start_limit_s: float = START_LIMIT_S,
        output: int = subprocess.PIPE,
        tls: Certificates | None = None,
        program: Sequence[str] = FROM_SOURCE,
        cwd: Path = ROOT,
        cold: bool = False,
        files: tuple[int, int] | None = None,
    ) -> None:
        """Prepares; nothing runs before the `with` block.

        Args:
            models: The model repository; None where the options name a model. The fake engine gets the light one in
                place of the demo model's.
            *options: More options; later ones win over the defaults (free ports, no lame duck, no niceness, a minute
                until a batch hangs, `PATIENT`).
            env: More environment variables.
            wait_ready: Wait for the announcement; without it, the ports are chosen here.
            start_limit_s: In which it must be ready.
            output: Where its output goes; without it, `log` has it.
            tls: What HTTP and gRPC are secured with; their addresses carry what clients need.
            program: The words that start `bertserve`.
            cwd: The directory that it is started in.
            cold: Start Python anew, as a shell does, where the fork server could start it as well.
            files: Soft and hard limit of its open files; without it, those of the tests. Only the fork server sets it.
        """
        self._output = output
        self._tls = tls
        if models == demo_repository() and ("--engine", "fake") in itertools.pairwise(options):
            models = light_repository()
        ports = {name: 0 if wait_ready else free_port() for name in ("http", "grpc", "metrics")}
        self._command = command(
            # Tests run side by side: the usual deadline of two seconds can pass on a machine that stands still, or a
            # batch seem to hang.
            *("--lame-duck-s", "0", "--engine-hang-s", "60", *PATIENT),
            *(() if models is None else ("--models", str(models))),
            *[word for name, port in ports.items() for word in (f"--{name}-port", str(port))],
            *(tls.options() if tls else ()),
            *options,
            program=program,
        )
        self._cwd = cwd
        self._environment = environment(env)
        self._forked = not cold and starts_warm(program, self._environment)
        assert files is None or self._forked
        self._files = files
        self._wait_ready = wait_ready
        self._start_limit_s = start_limit_s
        self._lines: list[str] = []
        self._announced = threading.Event()
        self._take_addresses(*(f"127.0.0.1:{port}" for port in ports.values()))

    def __enter__(self) -> Self:
        self.process: subprocess.Popen[str] | ForkedProcess
        if self._forked:
            words = self._command[len(FROM_SOURCE) :]
            self.process = fork_server().start(words, self._environment, self._cwd, self._output, files=self._files)
        else:
            self.process = subprocess.Popen(
                self._command,
                cwd=self._cwd,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        RUNNING.append(self)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if self._wait_ready:
            self.wait_announced()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_LIMIT_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(_STOP_LIMIT_S)
        RUNNING.remove(self)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """Everything written to standard output and standard error so far, the engine's lines included."""
        return "".join(self._lines)

    def log_tail(self, lines: int = _LOG_TAIL) -> str:
        return "".join(self._lines[-lines:])

    def engine_pid(self) -> int | None:
        """The engine process's id, or None while there is none."""
        return next(iter(self.engine_pids()), None)

    def engine_pids(self) -> list[int]:
        """The ids of all engine processes: during a swap, and after it, there are two."""
        return [pid for pid in child_pids(self.pid) if _is_engine(pid)]

    def child_pids(self) -> list[int]:
        return child_pids(self.pid)

    def wait_announced(self) -> None:
        """Waits for the announcement on standard output and reads the ports from it."""
        if not self._announced.wait(self._start_limit_s) or (found := _ANNOUNCED.search(self.log)) is None:
            if self.process.poll() is None:
                self.process.kill()
            status = self.process.wait()
            self.__exit__(None, None, None)
            raise AssertionError(f"the server did not become ready (exit code {status}):\n{self.log_tail()}")
        self._take_addresses(found["http"], found["grpc"], found["metrics"])

    def wait_state(self, state: str = "ready") -> None:
        """Waits until `/readyz` tells this state; for servers whose announcement is not read."""

        def told() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the server has ended (exit code {self.process.returncode}):\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(f"http://{self.metrics}/readyz", timeout=5) as reply:
                    return state in reply.read().decode()
            except OSError:
                return False

        wait_for(told, f"the state {state}", START_LIMIT_S)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = _STOP_LIMIT_S) -> int:
        return self.process.wait(seconds)

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def wait_logged(self, text: str, seconds: float = 10.0) -> None:
        wait_for(lambda: text in self.log, f"{text!r} in the log", seconds)

    def _take_addresses(self, http: str, grpc: str, metrics: str) -> None:
        self.http, self.grpc, self.metrics = http, grpc, metrics
        if self._tls is not None:
            self.http, self.grpc = Secured.of(http, self._tls), Secured.of(grpc, self._tls)

    def _read(self) -> None:
        stdout = self.process.stdout
        if stdout is None:
            return
        with stdout:
            for line in stdout:
                self._lines.append(line)
                if line.startswith("  metrics "):  # of the announcement the last that is looked for
                    self._announced.set()
        self._announced.set()  # nobody waits for a server that has gone


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def elapsed(started: float) -> float:
    return time.monotonic() - started


def child_pids(pid: int) -> list[int]:
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found += [int(child) for child in listed.read_text(encoding="ascii").split()]
    return found


def _is_engine(pid: int) -> bool:
    try:
        files = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "comm")]
    except OSError:
        return False
    return b"bertserve.serving.rollout.engine_process" in files[0] or files[1].decode().strip() == ENGINE
