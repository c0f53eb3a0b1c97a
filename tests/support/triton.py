"""A real `tritonserver` in a process of its own, from the wheel `nvidia-pytriton`, which `make programs` installs.

The wheel carries the server and its Python backend, no other. The backend's stub needs numpy 1, so it has an
environment of its own that borrows the rest from this one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from bertserve.loadtest.benchmarks.peers.triton import Installation
from tests.support.clients import get
from tests.support.external_servers import program
from tests.support.models import ROOT
from tests.support.server import free_port

if TYPE_CHECKING:
    from pathlib import Path

_INSTALLED = Installation(ROOT / "build" / "triton")


def obstacle() -> str | None:
    """Why no tritonserver can be started here; None where one can."""
    found = _INSTALLED.obstacle()
    return found and f"{found} (see make programs)"


class Triton:
    """A tritonserver that has loaded some models of a repository; use it in a `with` block."""

    def __init__(self, repository: Path, work: Path, *models: str) -> None:
        self.http, self.grpc = (f"127.0.0.1:{free_port()}" for _ in range(2))
        command = [
            *_INSTALLED.command(repository, work, self.http, self.grpc),
            *("--model-control-mode", "explicit"),
            *[word for model in models for word in ("--load-model", model)],
        ]
        self.log_path = work / "tritonserver.log"
        environment = {**os.environ, **_INSTALLED.variables()}
        self._program = program(command, self.log_path, self._is_ready, env=environment)

    def __enter__(self) -> Self:
        self.process = self._program.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._program.__exit__(*error)

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def _is_ready(self) -> bool:
        return get(self.http, "/v2/health/ready").status == 200
