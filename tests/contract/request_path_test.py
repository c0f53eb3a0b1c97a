"""How much of the server a short request passes."""

from __future__ import annotations

import signal
import sys
from http.client import HTTPConnection
from typing import TYPE_CHECKING

from tests.support.server import FAKE, Server
from tests.support.touched_files import ANNOUNCED
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

MAX_FILES = 26
_PROGRAM = (sys.executable, "tests/support/touched_files.py")
_COUNTED = "telemetry/metrics.py"
"""The last that a request passes: it is counted after its reply."""


def touched(server: Server) -> set[str]:
    """The files of `serving/` in which functions of the server process ran since the last call."""
    lines = server.log.count(ANNOUNCED)
    server.signal(signal.SIGUSR1)
    wait_for(lambda: server.log.count(ANNOUNCED) > lines, "the list of files")
    return set(server.log.rpartition(ANNOUNCED)[2].partition("\n")[0].split())


def way_of_a_request(server: Server) -> set[str]:
    """The files of `serving/` that the request passed that has just been answered."""
    way: set[str] = set()

    def is_counted() -> bool:
        way.update(touched(server))
        return _COUNTED in way

    wait_for(is_counted, "the request to be counted")
    return way


def test_a_warm_embed_passes_few_files(models: Path) -> None:
    """A reader who follows one text from its connection to its answer opens at most so many.

    What a timer does beside some of the requests is not on their way.
    """
    body = b'{"inputs": "What is a T4?"}'
    ways = []
    with Server(models, *FAKE, "--front-processes", "1", program=_PROGRAM) as server:
        connection = HTTPConnection(server.http)
        for _ in range(8):
            connection.request("POST", "/embed", body, {"Content-Type": "application/json"})
            assert connection.getresponse().read().startswith(b"[[")
            ways.append(way_of_a_request(server))
        connection.close()
    way = sorted(set.intersection(*ways[2:]))
    assert "http/connection.py" in way, way
    assert "engine/process/wire.py" in way, way
    assert _COUNTED in way, way
    assert len(way) <= MAX_FILES, f"{len(way)} files: {', '.join(way)}"
