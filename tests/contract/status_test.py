"""`/status`: what the scheduler knows, for operators and the console."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from tests.support.clients import Tei, get, http_call, post_json
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


def test_the_status_tells_rates_latencies_and_models(tasks_server: Server) -> None:
    """Of the last minute and since the start, and what each model's bundle says of it."""
    before = get(tasks_server.http, "/status").json()["totals"]
    for _ in range(3):
        assert post_json(tasks_server.http, "/embed", b'{"inputs": ["a", "b"]}').status == 200
    assert post_json(tasks_server.http, "/embed", b"{").status == 400

    def counted() -> dict[str, Any] | None:
        status: dict[str, Any] = get(tasks_server.http, "/status").json()
        return status if status["totals"]["requests"] - before["requests"] == 3 else None

    status = wait_for(counted, "three requests")
    totals, recent = status["totals"], status["recent"]
    assert totals["texts"] - before["texts"] == 6
    assert totals["errors"]["malformed_request"] == before["errors"].get("malformed_request", 0) + 1
    assert 0 < recent["seconds"] <= totals["seconds"] + 1
    assert recent["texts_per_s"] >= recent["requests_per_s"] > 0
    for stage in ("tokenize", "queue", "compute", "request"):
        latency = recent["latency"][stage]
        assert 0 <= latency["p50_ms"] <= latency["p90_ms"] <= latency["p99_ms"]
    assert recent["latency"]["request"]["p50_ms"] > 0
    models = {model["name"]: model for model in status["models"]}
    assert {model["task"] for model in models.values()} == set(models)
    embed = models["embed"]
    assert (embed["in_service"], embed["batch_invariant"], embed["max_length"]) == (True, True, 64)
    assert embed["parity"]["cosine_mean"] == 1.0
    assert embed["accuracy"] == []


def test_the_status_is_told_without_costs(fake_server: Server) -> None:
    """To who prefers that; all else is the same."""
    whole = get(fake_server.http, "/status").json()
    reply = http_call(fake_server.http, "GET", "/status", headers={"Prefer": "return=minimal"})
    assert reply.headers["preference-applied"] == "return=minimal"
    (model,) = whole["models"]
    assert model["costs"]["table"]
    assert reply.json()["models"] == [{**model, "costs": None}]
    assert reply.json().keys() == whole.keys()


def test_costs_are_measured_once_for_a_node(tasks_repository: Path, tmp_path: Path) -> None:
    """The second start finds them in the cache, and predicts with the very same numbers."""
    shutil.copytree(tasks_repository / "embed", tmp_path / "models" / "embed")
    tables = []
    for words in ("costs measured", "costs known from before"):
        with Server(tmp_path / "models", "--cache-dir", str(tmp_path / "cache")) as server:
            server.wait_logged(words)
            wait_for(lambda: list(tmp_path.rglob("costs.*.json")), "the file")
            (model,) = get(server.http, "/status").json()["models"]
            tables.append([(cell["tokens"], cell["texts"], cell["measured_us"]) for cell in model["costs"]["table"]])
    assert tables[0] == tables[1]
