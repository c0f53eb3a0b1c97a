"""Bulk work beside requests that somebody waits for, over the wire."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import Grpc, Refused, Tei, get, metric, post_json
from tests.support.server import ONE_AT_A_TIME, Server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.clients import HttpReply

BATCH_MS = 40
TEXT = "a text of nine words is eleven tokens long"
MOST_TOKENS = 400
BULK = {"X-Request-Priority": "4"}


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    """One text after another, each for 40 ms; a default deadline that bulk work could not keep; room for 30 texts."""
    options = ("--fake-ms", str(BATCH_MS), "--default-timeout-ms", "500", "--max-bulk-tokens", str(MOST_TOKENS))
    with Server(models, *ONE_AT_A_TIME, *options, "--bulk-share", "0.2") as running:
        yield running


def ask(server: Server, texts: int, headers: dict[str, str] | None = None) -> HttpReply:
    body = b'{"inputs": [%b]}' % b", ".join([b'"%b"' % TEXT.encode()] * texts)
    return post_json(server.http, "/embed", body, headers)


def test_queries_go_before_bulk_work_that_fills_its_queue(server: Server) -> None:
    """They are answered in time; more bulk work is refused, and what was admitted has no deadline."""
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(ask, server, 12, BULK) for _ in range(2)]
        wait_for(lambda: metric(server, "bertserve_bulk_queue_texts") > 20, "bulk work that waits")
        refused = ask(server, 12, BULK)
        assert refused.status == 429
        assert "bulk work" in refused.json()["error"]
        assert int(refused.headers["retry-after-ms"]) > 0
        for _ in range(4):
            assert ask(server, 1).status == 200
        assert not any(job.done() for job in jobs)
        status = get(server.http, "/status").json()
        assert status["queue"]["texts"] == 0
        assert status["bulk"]["texts"] > 10
        assert status["bulk"]["admitted_tokens"] <= status["bulk"]["most_tokens"] == MOST_TOKENS
        assert [job.result().status for job in jobs] == [200, 200]
    assert metric(server, "bertserve_bulk_refusals_total", reason="queue_full") == 1
    assert metric(server, "bertserve_requests_total", reason="bulk_overloaded") == 1
    assert metric(server, "bertserve_requests_total", reason="overloaded") == 0
    wait_for(lambda: metric(server, "bertserve_bulk_request_seconds_count") == 2, "both to be counted")
    assert metric(server, "bertserve_request_seconds_count") == 4
    assert metric(server, "bertserve_bulk_admitted_tokens") == 0


def test_bulk_work_goes_on_while_queries_never_stop(server: Server) -> None:
    """It has its share although somebody else always waits."""
    before = {name: metric(server, "bertserve_device_seconds_total", **{"class": name}) for name in ("online", "bulk")}
    ended = threading.Event()

    def keep_asking() -> None:
        while not ended.is_set():
            assert ask(server, 1).status in {200, 429}

    with ThreadPoolExecutor(5) as pool:
        queries = [pool.submit(keep_asking) for _ in range(4)]
        wait_for(lambda: metric(server, "bertserve_queue_texts") > 1, "queries that wait")
        job = pool.submit(ask, server, 6, BULK)
        try:
            wait_for(job.done, "the bulk work", 30)
        finally:
            ended.set()
        assert job.result().status == 200
        for query in queries:
            query.result()
    spent = {
        name: metric(server, "bertserve_device_seconds_total", **{"class": name}) - seconds
        for name, seconds in before.items()
    }
    assert spent["online"] > 0
    assert spent["bulk"] == pytest.approx(6 * BATCH_MS / 1e3, rel=0.5)


def test_a_deadline_of_its_own_counts_for_bulk_work(server: Server) -> None:
    """What even an idle server could not keep is refused, over HTTP and gRPC."""
    hurried = ask(server, 8, BULK | {"X-Request-Timeout-Ms": "60"})
    assert hurried.status == 504
    with Grpc(server) as client:
        request = client.request([TEXT] * 8)
        request.parameters["priority"].int64_param = 4
        request.parameters["timeout"].int64_param = 60_000
        assert client.infer.future(request).code().name == "DEADLINE_EXCEEDED"
        del request.parameters["timeout"]
        assert client.infer.future(request).code().name == "OK"
    assert metric(server, "bertserve_bulk_refusals_total", reason="hopeless") == 2


def test_the_default_deadline_still_counts_for_others(server: Server) -> None:
    """As many texts without a class of their own get the deadline of everybody."""
    with Tei(server) as client, pytest.raises(Refused):
        client.embed([TEXT] * 30, timeout_ms=500)
