"""Rows 35, 36 and 38 to 41 of the failure modes: more work than can be done, bulk work too, and what is done."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from bertserve.loadtest.benchmarks.processes import resident_bytes
from bertserve.loadtest.generator.scenario import Phase, Scenario
from tests.support import status_details
from tests.support.clients import (
    BOTH,
    STATUS,
    TRANSPORTS,
    Grpc,
    RawConnection,
    Refused,
    Tei,
    get,
    metric,
    metrics,
    post_json,
)
from tests.support.open_loop import EVEN, measured, target_of
from tests.support.server import ONE_AT_A_TIME, Server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.clients import HttpReply, Transport


BATCH_MS = 100
TEXT = "a text of nine words is eleven tokens long"
"""More than half of a batch's budget, so that each is a batch of its own."""

QUEUED = 12
FULL_S, SHORT_S = 60.0, 1.5

both = pytest.mark.parametrize("transport", BOTH, ids=lambda kind: kind.name)
every = pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda kind: kind.name)
protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])
seconds = pytest.mark.parametrize("lasting_s", [SHORT_S, pytest.param(FULL_S, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def slow_server(models: Path) -> Iterator[Server]:
    """A server that computes one text after another, each for a tenth of a second."""
    with Server(models, *ONE_AT_A_TIME, "--fake-ms", str(BATCH_MS), "--default-timeout-ms", "60000") as server:
        yield server


@contextlib.contextmanager
def occupied(server: Server, priority: int) -> Iterator[None]:
    """More than a second's work of a class in the queue while the block runs; all of it is answered."""
    wait_for(lambda: metric(server, "bertserve_admitted_tokens") == 0, "an idle server")
    before, headers = accepted_texts(server), {"X-Request-Priority": str(priority)}
    with ThreadPoolExecutor(QUEUED) as pool:
        asked = [pool.submit(ask, server, TEXT, headers=headers) for _ in range(QUEUED)]
        wait_for(lambda: accepted_texts(server) == before + QUEUED, "a queue")
        yield
    assert [one.result() for one in asked] == [200] * QUEUED


@pytest.fixture
def busy_server(slow_server: Server) -> Iterator[Server]:
    """The same, with more than a second's work that goes before whatever comes next."""
    with occupied(slow_server, 1):
        yield slow_server


def ask(server: Server, *texts: str, headers: dict[str, str] | None = None) -> int:
    """Sends one request over HTTP and returns its status."""
    body = b'{"inputs": [%b]}' % b", ".join(b'"%b"' % text.encode() for text in texts)
    return post_json(server.http, "/embed", body, headers).status


def accepted_texts(server: Server) -> float:
    """Texts that wait or were sent to the engine, as of one moment: a batch may start between two readings."""
    sampled = metrics(server)
    return sampled["bertserve_batch_size_sum"] + sampled["bertserve_queue_texts"]


@pytest.mark.sampled(11)
@every
@pytest.mark.parametrize(
    ("busy", "texts", "timeout_ms", "status"),
    [
        pytest.param(True, 1, 4 * BATCH_MS, "overloaded", id="35 a predicted miss"),
        pytest.param(True, 8, 900, "overloaded", id="35 of a request of several texts"),
        # Even an idle server would be too late: coming back later would not help, so that it is no overload.
        pytest.param(False, 1, BATCH_MS / 5, "too late", id="36 a deadline shorter than a batch"),
        pytest.param(True, 1, BATCH_MS / 5, "too late", id="36 the same under load"),
    ],
)
def test_rows_35_and_36_what_cannot_be_in_time(
    slow_server: Server,
    transport: type[Transport],
    busy: bool,  # noqa: FBT001
    texts: int,
    timeout_ms: float,
    status: str,
) -> None:
    """It is refused while those before it still wait, and nothing of it is computed; every route has the rule."""
    with occupied(slow_server, 1) if busy else contextlib.nullcontext(), transport(slow_server) as client:
        wait_for(lambda: busy or metric(slow_server, "bertserve_admitted_tokens") == 0, "an idle server")
        before = accepted_texts(slow_server)
        with pytest.raises(Refused) as refused:
            client.embed([TEXT] * texts, timeout_ms=timeout_ms)
        assert (metric(slow_server, "bertserve_queue_texts") > 0) is busy
        assert accepted_texts(slow_server) == before
    assert refused.value.status == STATUS[status][client.family]


def test_row_35_a_refusal_says_when_to_come_back(busy_server: Server) -> None:
    """In whole seconds, in milliseconds, and as gRPC's RetryInfo: about when what waits will be done."""
    with Tei(busy_server) as client, pytest.raises(Refused) as http:
        client.embed([TEXT], timeout_ms=3 * BATCH_MS)
    with Grpc(busy_server) as call, pytest.raises(Refused) as grpc:
        call.embed([TEXT], timeout_ms=3 * BATCH_MS)
    after_ms = int(http.value.headers["retry-after-ms"])
    assert 1 <= int(http.value.headers["retry-after"]) <= 1 + QUEUED * BATCH_MS * 4 // 1000
    assert BATCH_MS < after_ms < 2 * 4 * QUEUED * BATCH_MS
    code, message, delay_s = status_details.read(grpc.value.headers["grpc-status-details-bin"])
    assert code == 8
    assert "try again later" in message
    assert delay_s == pytest.approx(int(grpc.value.headers["retry-after-ms"]) / 1e3)


def test_row_35_a_shorter_wait_is_still_taken(busy_server: Server) -> None:
    with Tei(busy_server) as client:
        assert len(client.embed([TEXT], timeout_ms=60_000).vectors) == 1


def test_row_35_a_refusal_of_a_long_text_comes_before_tokenising(busy_server: Server) -> None:
    """Of an input that the tokenizer would find wrong, a busy server does not get to know that."""
    wrong = json.dumps({"inputs": [101, *[99999999] * 1000, 102]}).encode()
    hurry = {"X-Request-Timeout-Ms": str(4 * BATCH_MS)}
    assert post_json(busy_server.http, "/embed", wrong, hurry).status == 429
    assert post_json(busy_server.http, "/embed", wrong).status == 422


def test_row_38_the_default_deadline_leaves_room_for_what_a_request_costs(serve: Callable[..., Server]) -> None:
    """A text that takes longer than the default is given three times its own cost."""
    server = serve(*ONE_AT_A_TIME, "--fake-ms", "150", "--default-timeout-ms", "100")
    assert ask(server, TEXT) == 200
    assert ask(server, TEXT, headers={"X-Request-Timeout-Ms": "100"}) == 504


@pytest.mark.parametrize(("given", "status"), [("0", 200), ("1", 200), ("4", 200), ("5", 422), ("-1", 422), ("a", 422)])
def test_priorities_are_four_classes(fake_server: Server, given: str, status: int) -> None:
    """And 0 for the default; anything else is refused with a word about it."""
    assert ask(fake_server, TEXT, headers={"X-Request-Priority": given}) == status


@pytest.mark.parametrize(
    ("given", "status"), [(0, 200), (1, 200), (4, 200), (5, 400), (-1, 400), ("1", 400), (True, 400)]
)
def test_the_v2_protocol_has_a_parameter_for_it(fake_server: Server, given: Any, status: int) -> None:
    """`priority`, as Triton's clients send it, over HTTP and gRPC."""
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXT]}
    body = json.dumps({"inputs": [tensor], "parameters": {"priority": given}}).encode()
    assert post_json(fake_server.http, "/v2/models/minilm/infer", body).status == status
    kind = {bool: "bool_param", str: "string_param", int: "int64_param"}[type(given)]
    with Grpc(fake_server) as client:
        request = client.request([TEXT])
        setattr(request.parameters["priority"], kind, given)
        call = client.infer.future(request)
        assert call.code().name == ("OK" if status == 200 else "INVALID_ARGUMENT")


@both
def test_an_urgent_request_goes_first(slow_server: Server, transport: type[Transport]) -> None:
    """It is answered while those that came before it still wait."""
    with occupied(slow_server, 3):
        if transport is Tei:
            assert ask(slow_server, TEXT, headers={"X-Request-Priority": "1"}) == 200
        else:
            with Grpc(slow_server) as client:
                request = client.request([TEXT])
                request.parameters["priority"].uint64_param = 1
                client.infer(request)
        assert metric(slow_server, "bertserve_queue_texts") > QUEUED / 3


@both
def test_a_near_deadline_goes_before_far_ones(slow_server: Server, transport: type[Transport]) -> None:
    """Within a class, whoever has all the time of the world lets it pass."""
    with occupied(slow_server, 2), transport(slow_server) as client:
        client.embed([TEXT], timeout_ms=5 * BATCH_MS)
        assert metric(slow_server, "bertserve_queue_texts") > QUEUED / 3


@pytest.fixture(scope="module")
def quick_server(models: Path) -> Iterator[Server]:
    """A server that computes one text in 20 ms and answers it within half a second or not at all."""
    with Server(models, *ONE_AT_A_TIME, "--fake-ms", "20", "--default-timeout-ms", "500") as server:
        yield server


CAPACITY = 50.0
"""Texts a second that its engine computes at most."""


def load(multiple: float, lasting_s: float) -> Scenario:
    """Poisson arrivals at a multiple of the capacity."""
    phases = (Phase(lasting_s, 1, 1),)
    return dataclasses.replace(EVEN, phases=phases, rate=multiple * CAPACITY, arrivals="poisson")


@pytest.mark.sampled(1)
@protocols
@seconds
def test_row_39_ten_times_the_capacity(quick_server: Server, protocol: str, lasting_s: float) -> None:
    """What is answered does not fall: the rest is refused at once, and nothing piles up."""
    target = target_of(quick_server, protocol)
    twice = measured(target, load(2, lasting_s))
    memory = resident_bytes(quick_server.pid)
    flooded = measured(target, load(10, lasting_s))
    # In a second and a half a busy machine answers a few less; where overload takes the answers, hardly any are left.
    assert len(flooded.latency) >= (0.75 if lasting_s == FULL_S else 0.5) * len(twice.latency)
    assert len(flooded.latency) + flooded.failed == flooded.offered
    refused = flooded.faults["429 Too Many Requests"] + flooded.faults["RESOURCE_EXHAUSTED"]
    assert refused > flooded.offered / 2
    assert flooded.failed - refused <= 0.25 * len(flooded.latency), flooded.faults
    assert resident_bytes(quick_server.pid) < memory + 30_000_000
    assert metric(quick_server, "bertserve_admitted_tokens") == 0
    assert ask(quick_server, TEXT) == 200


@pytest.mark.sampled(1)
@protocols
def test_row_40_a_spike_leaves_nothing_behind(quick_server: Server, protocol: str) -> None:
    """A second of five times the capacity; then requests are answered as before."""
    phases = (Phase(1, 0.1, 0.1), Phase(1, 0.1, 1), Phase(0.5, 1, 1))
    measured(target_of(quick_server, protocol), dataclasses.replace(load(5, 1), phases=phases))
    wait_for(lambda: ask(quick_server, TEXT) == 200, "an answer after the spike", 5)
    wait_for(lambda: metric(quick_server, "bertserve_queue_texts") == 0, "an empty queue", 5)


@both
def test_row_41_a_batch_client_beside_short_texts(quick_server: Server, transport: type[Transport]) -> None:
    """Each short text overtakes the batch, which is answered all the same while they keep coming."""
    with ThreadPoolExecutor(1) as pool, transport(quick_server) as client:
        batch = pool.submit(ask, quick_server, *[TEXT] * 32, headers={"X-Request-Timeout-Ms": "30000"})
        wait_for(lambda: metric(quick_server, "bertserve_queue_texts") > 20, "the batch in the queue")
        client.embed(["short"], timeout_ms=10_000)
        assert not batch.done(), "the short text did not wait for the batch"
        limit = time.monotonic() + 30
        while not batch.done():
            client.embed(["short"], timeout_ms=10_000)
            assert time.monotonic() < limit, "the batch starves"
        assert batch.result() == 200


BULK_MS = 40
MAX_TOKENS = 524_288
LONG = ["server " * 260] * 1100
"""Half of the tokens of bulk work that may be in flight, and a little more."""
BULK = {"X-Request-Priority": "4"}


@pytest.fixture(scope="module")
def bulk_server(models: Path) -> Iterator[Server]:
    """One text after another, each for 40 ms; a default deadline that bulk work could not keep."""
    options = ("--fake-ms", str(BULK_MS), "--default-timeout-ms", "500")
    with Server(models, *ONE_AT_A_TIME, *options) as running:
        yield running


def ask_bulk(bulk_server: Server, texts: int, headers: dict[str, str] | None = None) -> HttpReply:
    body = b'{"inputs": [%b]}' % b", ".join([b'"%b"' % TEXT.encode()] * texts)
    return post_json(bulk_server.http, "/embed", body, headers)


def test_queries_go_before_bulk_work_that_fills_its_queue(bulk_server: Server) -> None:
    """They are answered in time; more bulk work is refused, and what was admitted has no deadline."""
    body = json.dumps({"inputs": LONG}).encode()
    head = "POST /embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Request-Priority: 4\r\n"
    with ThreadPoolExecutor(1) as pool, RawConnection(bulk_server.http) as filling:
        job = pool.submit(ask_bulk, bulk_server, 25, BULK)
        filling.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: get(bulk_server.http, "/status").json()["bulk"]["texts"] > 1000, "bulk work that waits", 30)
        refused = post_json(bulk_server.http, "/embed", body, BULK)
        assert refused.status == 429
        assert "bulk work" in refused.json()["error"]
        assert int(refused.headers["retry-after-ms"]) > 0
        for _ in range(4):
            assert ask_bulk(bulk_server, 1).status == 200
        status = get(bulk_server.http, "/status").json()
        assert status["queue"]["texts"] == 0
        assert status["bulk"]["texts"] > 10
        assert MAX_TOKENS / 2 < status["bulk"]["admitted_tokens"] <= status["bulk"]["most_tokens"] == MAX_TOKENS
        assert job.result().status == 200
    assert metric(bulk_server, "bertserve_bulk_refusals_total", reason="queue_full") == 1
    assert metric(bulk_server, "bertserve_requests_total", reason="bulk_overloaded") == 1
    assert metric(bulk_server, "bertserve_requests_total", reason="overloaded") == 0
    wait_for(lambda: metric(bulk_server, "bertserve_requests_total", reason="ok") == 5, "all to be counted")
    assert metric(bulk_server, "bertserve_request_seconds_count") == 4
    wait_for(lambda: metric(bulk_server, "bertserve_bulk_admitted_tokens") == 0, "the end of what nobody waits for")


def test_bulk_work_goes_on_while_queries_never_stop(bulk_server: Server) -> None:
    """It has its share although somebody else always waits."""
    before = {
        name: metric(bulk_server, "bertserve_device_seconds_total", **{"class": name}) for name in ("online", "bulk")
    }
    ended = threading.Event()

    def keep_asking() -> None:
        while not ended.is_set():
            assert ask_bulk(bulk_server, 1).status in {200, 429}

    with ThreadPoolExecutor(5) as pool:
        queries = [pool.submit(keep_asking) for _ in range(4)]
        wait_for(lambda: metric(bulk_server, "bertserve_queue_texts") > 1, "queries that wait")
        job = pool.submit(ask_bulk, bulk_server, 6, BULK)
        try:
            wait_for(job.done, "the bulk work", 30)
        finally:
            ended.set()
        assert job.result().status == 200
        for query in queries:
            query.result()
    spent = {
        name: metric(bulk_server, "bertserve_device_seconds_total", **{"class": name}) - seconds
        for name, seconds in before.items()
    }
    assert spent["online"] > 0
    assert spent["bulk"] == pytest.approx(6 * BULK_MS / 1e3, rel=0.5)


def test_a_deadline_of_its_own_counts_for_bulk_work(bulk_server: Server) -> None:
    """What even an idle server could not keep is refused, over HTTP and gRPC."""
    hurried = ask_bulk(bulk_server, 8, BULK | {"X-Request-Timeout-Ms": "60"})
    assert hurried.status == 504
    with Grpc(bulk_server) as client:
        request = client.request([TEXT] * 8)
        request.parameters["priority"].int64_param = 4
        request.parameters["timeout"].int64_param = 60_000
        assert client.infer.future(request).code().name == "DEADLINE_EXCEEDED"
        del request.parameters["timeout"]
        assert client.infer.future(request).code().name == "OK"
    assert metric(bulk_server, "bertserve_bulk_refusals_total", reason="hopeless") == 2


def test_the_default_deadline_still_counts_for_others(bulk_server: Server) -> None:
    """As many texts without a class of their own get the deadline of everybody."""
    with Tei(bulk_server) as client, pytest.raises(Refused):
        client.embed([TEXT] * 30, timeout_ms=500)
