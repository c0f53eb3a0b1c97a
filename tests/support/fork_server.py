"""Processes that have imported what a command needs, and fork for each one that a test starts.

The imports of `bertserve serve` cost 0.75 s of CPU, those of `bertserve export` 4 s, a fork 10 ms, and the tests start
servers by the hundred. What runs in the child is `bertserve.main` with the words of the command line, as in a process
of its own. Where the start of Python itself matters (`PYTHON...` variables, other programs), tests start a process as a
shell would.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import importlib
import itertools
import json
import math
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from bertserve.serving.cli import BEFORE_IMPORTS
from bertserve.serving.engine.process import remote_engine
from bertserve.serving.rollout import engine_process
from bertserve.serving.settings import _parser
from tests.support.models import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SERVING = (
    "bertserve",
    "bertserve.serving.cli",
    "bertserve.serving.fronts.front",
    "bertserve.serving.rollout.engine_choice",
    "bertserve.serving.rollout.model_export",
    "bertserve.serving.server",
    "bertserve.serving.settings",
)
EXPORTING = (
    "bertserve",
    "bertserve.export.build",
    "bertserve.export.cli.export",
    # What an export imports of these libraries when it uses them.
    "sentence_transformers",
    "sympy.combinatorics",
    "torch.onnx.operators",
    "transformers.models.bert.modeling_bert",
)
ENGINE = "forked-engine"
"""The name of a forked engine's process, whose command line is the fork server's."""

_MESSAGE_BYTES = 1 << 17
_START_LIMIT_S = 60.0


class ForkedProcess:
    """A child of the fork server, with the part of `subprocess.Popen`'s interface that tests use."""

    def __init__(self, pid: int, ended: Future[int], stdout: IO[str] | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self._ended = ended

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code, negative for a signal's number; as `Popen` if it still runs."""
        try:
            return self._ended.result(timeout)
        except NotYet:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The near end of a fork server; it ends with this process, and its children with it."""

    def __init__(self, imported: Sequence[str]) -> None:
        """Imports these modules before it forks; they start no threads that a fork would miss."""
        self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(far.fileno()), *imported],
                cwd=ROOT,
                env={**os.environ, **BEFORE_IMPORTS},
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the keyboard is for the tests, which end it
            )
        self._lock = threading.Lock()
        self._started: Future[tuple[int, Future[int]]] = Future()
        self._running: dict[int, Future[int]] = {}
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._close)

    def start(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        output: int = subprocess.PIPE,
        errors: int | None = None,
        files: tuple[int, int] | None = None,
    ) -> ForkedProcess:
        """Starts `bertserve` with these words; without descriptors, `stdout` reads its output and its errors."""
        limits = files or resource.getrlimit(resource.RLIMIT_NOFILE)  # as a child of this process would have them
        message = json.dumps([list(words), dict(env), str(cwd), limits]).encode()
        stdout = None
        with contextlib.ExitStack() as stack:
            if output == subprocess.PIPE:
                reading, output = os.pipe()
                stdout = os.fdopen(reading, errors="replace")
                stack.callback(os.close, output)
            with self._lock:
                self._started = Future()
                socket.send_fds(self._socket, [message], [output, output if errors is None else errors])
                pid, ended = self._started.result(_START_LIMIT_S)
                return ForkedProcess(pid, ended, stdout)

    def run(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        timeout_s: float,
        files: tuple[int, int] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs `bertserve` with these words to its end; one that has none in time is killed."""
        # A pipe would have to be read meanwhile.
        with (
            tempfile.TemporaryFile("w+", errors="replace") as out,
            tempfile.TemporaryFile("w+", errors="replace") as err,
        ):
            process = self.start(words, env, cwd, out.fileno(), err.fileno(), files)
            try:
                code = process.wait(timeout_s)
            finally:
                process.kill()
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(list(words), code, out.read(), err.read())

    def _listen(self) -> None:
        while message := self._socket.recv(_MESSAGE_BYTES):
            pid, code = json.loads(message)
            if code is None:
                ended: Future[int] = Future()
                self._running[pid] = ended
                self._started.set_result((pid, ended))
            else:
                self._running.pop(pid).set_result(code)

    def _close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()


@functools.cache
def fork_server() -> ForkServer:
    return ForkServer(SERVING)


@functools.cache
def export_fork_server() -> ForkServer:
    return ForkServer(EXPORTING)


def _serve(near: socket.socket, imported: Sequence[str]) -> int:
    """Forks for each message, and tells how children end; returns an exit code, that of a command in a child."""
    for name in imported:
        importlib.import_module(name)
    _parser()  # describes every setting, and is kept
    gc.collect()
    gc.freeze()  # children share these pages as long as nobody writes into them
    children: set[int] = set()
    ends = socket.socketpair()
    ends[0].setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ends[0].fileno(), warn_on_full_buffer=False)
    while True:
        if ends[1] in select.select([near, ends[1]], [], [])[0]:
            ends[1].recv(_MESSAGE_BYTES)
            _tell_ends(near, children)
            continue
        message, outputs, _, _ = socket.recv_fds(near, _MESSAGE_BYTES, 2)
        if not message:  # the tests have ended
            for child in children:
                os.kill(child, signal.SIGKILL)
            return 0
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            for end in (near, *ends):
                end.close()
            return _command(outputs, *json.loads(message))
        children.add(pid)
        near.send(json.dumps([pid, None]).encode())
        for descriptor in outputs:
            os.close(descriptor)


def _tell_ends(near: socket.socket, children: set[int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        children.remove(pid)
        near.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())


def _search(path: str) -> None:
    """Looks for modules where a start of Python with this `PYTHONPATH` would; none may be imported that it replaces."""
    added = [place for place in path.split(os.pathsep) if place and place not in sys.path]
    replaced = {entry.name.partition(".")[0] for place in added for entry in os.scandir(place)} & sys.modules.keys()
    if replaced:
        raise ImportError(f"imported from elsewhere: {', '.join(sorted(replaced))}")
    sys.path[1:1] = added  # behind the program's own directory


class _Forks:
    """In place of `subprocess`: a process of a server is forked from it, which has imported all of it."""

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    class Popen:
        def __init__(self, command: Sequence[str], pass_fds: Sequence[int], stdin: int) -> None:
            assert (command[2], stdin) == ("-m", subprocess.DEVNULL)
            self.returncode: int | None = None
            self._lock = threading.Lock()
            self.pid = os.fork()
            if not self.pid:
                _become(command[3], pass_fds)

        def poll(self) -> int | None:
            with self._lock:
                if self.returncode is None:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

        def wait(self, timeout: float = math.inf) -> int:
            end = time.monotonic() + timeout
            while (status := self.poll()) is None:
                if time.monotonic() > end:
                    raise subprocess.TimeoutExpired(self.pid, timeout)
                time.sleep(0.005)
            return status

        def kill(self) -> None:
            os.kill(self.pid, signal.SIGKILL)


def _become(module: str, descriptors: Sequence[int]) -> NoReturn:
    """Makes of this copy of a server the process that `python -m module` is."""
    try:
        signal.set_wakeup_fd(-1)
        asyncio._set_running_loop(None)
        kept = sorted((0, 1, 2, *descriptors, os.sysconf("SC_OPEN_MAX")))
        for one, other in itertools.pairwise(kept):
            os.closerange(one + 1, other)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if module == engine_process.__name__:
            Path("/proc/self/comm").write_text(ENGINE, encoding="ascii")
            engine_process.main(list(descriptors))
        from bertserve.serving.fronts import front  # noqa: PLC0415  long imported
        from bertserve.serving.net import requests  # noqa: PLC0415  likewise

        requests._process = os.urandom(6).hex()  # as the import does
        gc.freeze()  # what was open in the server would close descriptors that are others here
        front.main(*descriptors)
    finally:
        os._exit(1)


def _command(outputs: list[int], words: list[str], env: dict[str, str], cwd: str, limits: list[int]) -> int:
    """Makes of this copy of the fork server a process that was started with these words, and runs it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, descriptor)
    for output in set(outputs):
        os.close(output)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0], limits[1]))
    _search(env.get("PYTHONPATH", ""))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    # The hub's client reads the environment when it is imported.
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]
    if ("--engine", "fake") in itertools.pairwise(words):
        remote_engine.subprocess = _Forks()  # type: ignore[assignment]
    sys.argv = ["bertserve", *words]
    from bertserve import main  # noqa: PLC0415  long imported
    from bertserve.serving.fronts import pool  # noqa: PLC0415  likewise

    pool.subprocess = _Forks()  # type: ignore[assignment]

    return main(words)


if __name__ == "__main__":
    sys.exit(_serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]))
