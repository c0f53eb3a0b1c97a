"""A real `tritonserver` in a process of its own, from the wheel `nvidia-pytriton`, which `make triton` installs.

The wheel carries the server and its Python backend, no other. The backend's stub needs numpy 1, so it has an
environment of its own that borrows the rest from this one.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Self

from loadtest.benchmarks.peers.triton import Installation
from tests.support.clients import get
from tests.support.models import ROOT
from tests.support.server import free_port
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

START_LIMIT_S = 60.0
_STOP_LIMIT_S = 30.0
_INSTALLED = Installation(ROOT / "build" / "triton")


def obstacle() -> str | None:
    """Why no tritonserver can be started here; None where one can."""
    found = _INSTALLED.obstacle()
    return found and f"{found} (see make triton)"


class Triton:
    """A tritonserver that has loaded some models of a repository; use it in a `with` block.

    Attributes:
        http: `host:port` of HTTP.
        grpc: `host:port` of gRPC.
    """

    def __init__(self, repository: Path, work: Path, *models: str) -> None:
        """Prepares; nothing runs before the `with` block.

        Args:
            repository: The Triton model repository.
            work: A directory to write to.
            *models: What to load; the others are left alone.
        """
        self._repository = repository
        self._work = work
        self._models = models
        self.http, self.grpc = (f"127.0.0.1:{free_port()}" for _ in range(2))

    def __enter__(self) -> Self:
        """Starts the server and waits until it is ready."""
        command = [
            *_INSTALLED.command(self._repository, self._work, self.http, self.grpc),
            *("--model-control-mode", "explicit"),
            *[word for model in self._models for word in ("--load-model", model)],
        ]
        environment = {**os.environ, **_INSTALLED.variables()}
        self.log_path = self._work / "tritonserver.log"
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_for(self._ready_or_gone, "a ready tritonserver", START_LIMIT_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        if self.process.poll() is not None:
            raise AssertionError(f"tritonserver ended with {self.process.returncode}:\n{self.log}")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def _ready_or_gone(self) -> bool:
        if self.process.poll() is not None:
            return True
        try:
            return get(self.http, "/v2/health/ready").status == 200
        except OSError:
            return False
