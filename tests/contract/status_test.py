"""`/status`: what the scheduler knows, for operators and the console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.clients import Tei, get
from tests.support.server import Server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path


def test_the_status_tells_state_engine_queue_and_costs(fake_server: Server) -> None:
    """On both ports, with every cell of the cost table: what was measured and what is predicted now."""
    with Tei(fake_server) as client:
        client.embed(["a text"])
    wait_for(lambda: get(fake_server.metrics, "/status").json()["batches"]["count"] > 0, "a batch")
    for address in (fake_server.http, fake_server.metrics):
        status = get(address, "/status").json()
        assert status["state"] == "ready"
        assert status["engine"]["name"] == "fake"
        assert status["engine"]["lanes"][0] == "wide"
        assert status["queue"] == {"requests": 0, "texts": 0, "tokens": 0, "work_ms": 0.0}
        assert status["admission"]["tokens"] == 0
        (model,) = status["models"]
        wide = [cell for cell in model["costs"]["table"] if cell["kind"] == "wide" and cell["texts"] == 1]
        assert [cell["tokens"] for cell in wide] == [8, 16, 32, 64, 128, 256]
        assert all(cell["predicted_us"] >= 0 for cell in wide)


def test_costs_are_measured_once_for_a_node(models: Path, tmp_path: Path) -> None:
    """The second start finds them in the cache, and predicts with the very same numbers."""
    tables = []
    for words in ("costs measured", "costs known from before"):
        with Server(models, "--cache-dir", str(tmp_path)) as server:
            server.wait_logged(words)
            wait_for(lambda: list(tmp_path.rglob("costs.*.json")), "the file")
            (model,) = get(server.http, "/status").json()["models"]
            tables.append([(cell["tokens"], cell["texts"], cell["measured_us"]) for cell in model["costs"]["table"]])
    assert tables[0] == tables[1]
