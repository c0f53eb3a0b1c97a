"""The simulator and the baseline beside a real server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from loadtest.benchmarks import simulator
from loadtest.benchmarks.drive import Workload, drive, even
from loadtest.capacity.simulate_cli import main
from loadtest.generator.scenario import Phase
from tests.support.clients import get
from tests.support.open_loop import target_of
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.server import Server
    from tests.support.versions import Shelf

WORKLOAD = Workload.of(["a text of a few words", "a b c d e f g"], [8, 8])
SLOW = ("--engine", "fake", "--fake-ms", "20", "--threads", "1", "--precision", "fp32")


def test_a_server_tells_what_a_simulation_needs(
    serve: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`/status` is a table of costs: a text takes at least the 20 ms that this engine takes for a batch."""
    status = get(serve(*SLOW).metrics, "/status").json()
    path = tmp_path / "status.json"
    path.write_text(json.dumps(status))
    assert main(["--cost", str(path), "--tokens", "8", "--rate", "10", "--duration", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["p50_ms"] >= 20
    assert found["answered_per_s"] == pytest.approx(found["offered_per_s"])


def test_a_node_keeps_what_a_simulation_needs(
    serve: Callable[..., Server], own_shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So is the file in the node's cache, once a server with a real engine has measured."""
    node = tmp_path / "node"
    serve("--precision", "fp32", "--engine", "ort-cpu", "--cache-dir", str(node), repository=own_shelf.root)
    [path] = wait_for(lambda: list(node.glob("[!.]*/[0-9]*/[0-9]*/costs.*.json")), "the costs in the cache")
    assert main(["--cost", str(path), "--tokens", "8-100", "--rate", "5", "--duration", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["p50_ms"] > 0


def test_the_very_requests_of_a_run_are_simulated(serve: Callable[..., Server]) -> None:
    """What was sent and what is replayed are the same requests; all are answered in both."""
    server = serve(*SLOW)
    requests, _ = drive(target_of(server, "http"), WORKLOAD, even(2.0), 20.0, 3)
    replayed = WORKLOAD.requests(even(2.0), 20.0, 3)
    assert sorted(requests.intended.tolist()) == pytest.approx([at for at, _ in replayed])
    assert requests.answered.all()
    told = simulator.replay(get(server.metrics, "/status").json(), replayed, 2.0, {"receive": 500.0})
    assert told["fates"] == {"answered": len(replayed)}
    assert told["p50_ms"] >= 20
    assert told["compute_ms"] >= 20


@pytest.mark.long
def test_the_baseline_answers_whom_we_refuse(serve: Callable[..., Server]) -> None:
    """Far more than a deadline allows: ours refuses at once; first come, first served lets everybody wait in vain."""
    options = (*SLOW, "--default-timeout-ms", "200", "--max-batch-tokens", "16")
    found = {}
    for kind in ("deadline", "fifo"):
        server = serve(*options, "--scheduling", kind)
        phases = (Phase(0.8, 1, 1),)
        drive(target_of(server, "http"), WORKLOAD, phases, 300.0, 5)
        found[kind] = get(server.metrics, "/status").json()["admission"]
    assert found["deadline"]["refusals"]["predicted_late"] > 100
    assert found["fifo"]["refusals"] == {"queue_full": 0, "predicted_late": 0, "hopeless": 0, "not_ready": 0}
    assert found["fifo"]["deadline_misses"]["queue"] > 100
