"""Row 60 of the failure modes: a log that nobody takes and descriptors that run out stop nobody."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import RawConnection, Tei, get, metric, post_json
from tests.support.engines import kill_engine
from tests.support.server import FAKE, Server, is_running
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

SENT = 30


def serve_some(server: Server) -> None:
    """Answers, and refusals that each want a line in the log."""
    with Tei(server) as client:
        for _ in range(SENT):
            client.embed(["a text"])
    for _ in range(SENT):
        assert post_json(server.http, "/embed", b'{"inputs": 5}').status == 422


def lost(server: Server) -> float:
    return metric(server, "bertserve_log_lines_lost_total")


@contextlib.contextmanager
def writing_to(models: Path, output: int, *options: str) -> Iterator[Server]:
    """A server that is ready and whose output goes there."""
    with Server(models, *FAKE, *options, wait_ready=False, output=output) as server:
        server.wait_state()
        yield server


@pytest.mark.parametrize("form", ["text", pytest.param("json", marks=pytest.mark.long)])
def test_row_60_the_log_pipe_is_closed(models: Path, form: str) -> None:
    """Every request is answered, the lines are counted as lost, and the end is a good one."""
    reader, writer = os.pipe()
    with writing_to(models, writer, "--log-format", form, "--access-log", "true") as server:
        os.close(writer)
        os.close(reader)
        serve_some(server)
        wait_for(lambda: lost(server) >= 2 * SENT, "the lost lines to be counted")
        assert server.stop() == 0


@pytest.mark.long
def test_row_60_the_disk_is_full(models: Path) -> None:
    """From the start: the announcement and every line are lost, and nothing else."""
    full = os.open("/dev/full", os.O_WRONLY)
    with writing_to(models, full, "--access-log", "true") as server:
        os.close(full)
        serve_some(server)
        wait_for(lambda: lost(server) >= 2 * SENT, "the lost lines to be counted")
        assert server.stop() == 0


def test_row_60_nobody_reads_the_log(models: Path) -> None:
    """A pipe that is full and stays so: what is written waits, what is served does not."""
    reader, writer = os.pipe()
    try:
        with writing_to(models, writer, "--access-log", "true") as server:
            os.close(writer)
            with Tei(server) as client:
                for _ in range(600):  # more lines than a pipe holds
                    client.embed(["a text"])
            assert metric(server, "bertserve_requests_total", reason="ok") >= 599
            assert server.stop() == 0
    finally:
        os.close(reader)


@pytest.mark.long
def test_row_60_an_engine_dies_while_the_log_is_lost(models: Path) -> None:
    """The engine process writes there too: a new one starts and is ready."""
    full = os.open("/dev/full", os.O_WRONLY)
    with writing_to(models, full) as server:
        os.close(full)
        engine = kill_engine(server)
        wait_for(lambda: not is_running(engine), "its end")
        wait_for(lambda: metric(server, "bertserve_engine_restarts_total") == 1, "it to be noticed")
        server.wait_state()
        serve_some(server)
        assert server.stop() == 0


def test_row_60_descriptors_run_out(models: Path) -> None:
    """Who is connected is served on; others are served again as soon as descriptors are free."""
    with Server(models, *FAKE) as server, Tei(server) as connected:
        connected.embed(["a text"])
        used = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used + 20, used + 20))
        with contextlib.ExitStack() as crowd:
            for _ in range(60):
                with contextlib.suppress(OSError):
                    crowd.enter_context(RawConnection(server.http))
            for _ in range(SENT):
                connected.embed(["a text"])
        wait_for(lambda: _answers(server), "a new connection to be served")
        serve_some(server)
        assert len(server.log.splitlines()) < 100
        assert server.stop() == 0


def _answers(server: Server) -> bool:
    try:
        return get(server.http, "/readyz").status == 200
    except OSError:
        return False
