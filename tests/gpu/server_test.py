"""A server on a real GPU."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from bertserve.serving.engine.gpu import discovery
from tests.support.clients import get, post_json
from tests.support.server import Server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bertserve.serving.engine.gpu.discovery import Machine
    from bertserve.serving.models.bundle import Bundle

pytestmark = pytest.mark.gpu

KILLS = 2
"""An engine is given up at its third crash within a minute."""
READY_AGAIN_S = 60.0


@pytest.fixture(scope="module")
def server(machine: Machine, bundle: Bundle, proven: Path) -> Iterator[Server]:
    """One that takes the best engine that this GPU has."""
    assert machine.gpus
    with Server(bundle.path.parents[1], "--cache-dir", str(proven)) as running:
        yield running


def embed(server: Server) -> int:
    return post_json(server.http, "/embed", json.dumps({"inputs": "What is a T4?"}).encode()).status


def test_it_runs_on_the_card_and_says_so(server: Server, machine: Machine) -> None:
    """Not on the CPU, and not in silence."""
    status = get(server.http, "/status").json()
    assert status["state"] == "ready"
    assert status["choice"]["engine"] in {"tensorrt", "ort-cuda"}
    assert status["choice"]["cards"][0]["name"] == machine.gpus[0].name
    assert embed(server) == 200


def test_kills_in_a_row(server: Server, machine: Machine) -> None:
    """Each time another process serves, and the GPU's memory is where it was."""
    assert embed(server) == 200
    free = discovery.look().free_bytes[0]
    for _ in range(KILLS):
        before = wait_for(server.engine_pid, "an engine process", READY_AGAIN_S)
        os.kill(before, signal.SIGKILL)
        wait_for(lambda before=before: server.engine_pid() not in {None, before}, "another one", READY_AGAIN_S)
        wait_for(lambda: embed(server) == 200, "an answer", READY_AGAIN_S)
    least = free - (machine.gpus[0].memory_bytes - free) * 0.02 - (64 << 20)
    wait_for(lambda: discovery.look().free_bytes[0] > least, "the memory given back", 30)


def test_a_crash_loop_falls_back_to_the_cpu(machine: Machine, bundle: Bundle, proven: Path) -> None:
    """Where that is allowed; degraded, and answering."""
    assert machine.gpus
    with Server(bundle.path.parents[1], "--cache-dir", str(proven), "--cpu-fallback", "true") as server:
        killed: set[int | None] = {None}
        for _ in range(3):
            wait_for(lambda: server.engine_pid() not in killed, "an engine process", READY_AGAIN_S)
            pid = server.engine_pid()
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        server.wait_state("degraded")
        assert embed(server) == 200
        assert get(server.http, "/status").json()["choice"]["engine"] == "ort-cpu"


def test_a_server_without_a_card_to_see_takes_the_cpu(machine: Machine, bundle: Bundle) -> None:
    """Row 50: the GPU is there and hidden from it."""
    assert machine.gpus
    with Server(bundle.path.parents[1], env={"CUDA_VISIBLE_DEVICES": ""}) as server:
        choice = get(server.http, "/status").json()["choice"]
        assert choice["engine"] == "ort-cpu"
        assert any("no GPU" in entry["reason"] for entry in choice["rejected"])
        assert embed(server) == 200
