"""Every route and every call that a server has, from its own tables."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.models import ROOT

if TYPE_CHECKING:
    from bertserve.serving.http.app import App


@dataclass(frozen=True)
class Tables:
    """What a server with these models answers.

    Attributes:
        http: Method and path of each route of the HTTP port; parts in braces stand for names.
        probes: The same of the metrics port.
        grpc: The path of each call of the gRPC port.
    """

    http: list[list[str]]
    probes: list[list[str]]
    grpc: list[str]

    @classmethod
    def of(cls, models: Path) -> Tables:
        """Has them read in another process: the server's messages and tritonclient's do not bear each other."""
        command = [sys.executable, "-m", "tests.support.tables", str(models)]
        return cls(**json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout))


def read_tables(models: Path) -> Tables:
    from bertserve.serving.logs import LogWriter  # noqa: PLC0415
    from bertserve.serving.net.ports import Ports  # noqa: PLC0415
    from bertserve.serving.rollout.engine_choice import Chooser  # noqa: PLC0415  not beside tritonclient, as above
    from bertserve.serving.server import build  # noqa: PLC0415
    from bertserve.serving.settings import Settings  # noqa: PLC0415

    settings = Settings.load(["--models", str(models), "--engine", "fake"], {})
    ports = Ports(*(socket.socket() for _ in range(3)))
    chooser = Chooser(settings)
    server = build(settings, chooser.first(), chooser, ports, LogWriter("text"))
    http, probes = (_routes(listener._port.app) for listener in (server.listeners.http, server.probes))
    return Tables(http, probes, list(server.listeners.grpc.methods))


def _routes(app: App) -> list[list[str]]:
    return [[route.method, route.path] for route in app.routes]


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(read_tables(Path(sys.argv[1])))))  # noqa: T201  what the test reads
