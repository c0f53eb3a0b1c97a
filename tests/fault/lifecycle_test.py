"""Rows 54 to 61 of the failure modes: how the server starts, drains and ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.asking import asking, failures, numbered_texts, wait_for_more
from tests.support.canary import CANARY, sing
from tests.support.certificates import open_channel
from tests.support.clients import (
    BOTH,
    STATUS,
    TRANSPORTS,
    Grpc,
    HttpConnection,
    RawConnection,
    Refused,
    Tei,
    get,
    metric,
    post_json,
)
from tests.support.engines import engine_of, stopped_engine
from tests.support.expected import fake_answers
from tests.support.server import FAKE, Server, elapsed, is_running, listening, refused_start
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from tests.support.clients import Answer, Transport

SMALL = json.dumps({"inputs": "small"}).encode()
CANARY_TOKENS = 16
PROMPTLY_S = 20.0
"""On a busy machine too; what must not be waited for takes a minute or more."""
LONG_WARM_UP = ("--fake-ms", "5000")
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


def health(server: Server) -> int:
    """What the gRPC health service says of the whole server."""
    with open_channel(server.grpc) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    return int(reply.status)


@pytest.fixture(scope="module")
def warming_server(models: Path) -> Iterator[Server]:
    """A server whose engine is busy warming up for half a minute."""
    with Server(models, *FAKE, *LONG_WARM_UP, wait_ready=False) as server:
        server.wait_logged("state: warming")
        yield server


@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda kind: kind.name)
def test_row_54_request_before_ready(warming_server: Server, transport: type[Transport]) -> None:
    """A request during warm-up is 503 / UNAVAILABLE at once, over HTTP with `Retry-After`; nonsense stays 400."""
    with transport(warming_server) as client, pytest.raises(Refused) as refused:
        client.embed(["x"])
    assert refused.value.status == STATUS["unavailable"][client.family]
    assert client.family == "grpc" or int(refused.value.headers["retry-after"]) >= 1
    assert post_json(warming_server.http, "/embed", b"{").status == 400


def test_row_54_probes_before_ready(warming_server: Server) -> None:
    """Meanwhile the server is live and not ready, on both ports, and gRPC's health says NOT_SERVING."""
    for address in (warming_server.http, warming_server.metrics):
        assert get(address, "/livez").status == 200
        assert get(address, "/readyz").status == 503
    assert get(warming_server.http, "/v2/health/live").status == 200
    assert get(warming_server.http, "/v2/health/ready").status == 400
    assert get(warming_server.http, "/v2/models/minilm/ready").status == 400
    assert health(warming_server) == NOT_SERVING


def test_a_cold_start(models: Path) -> None:
    """A server that a shell starts, imports included, gets ready, answers, ends with 0, and its engine with it."""
    with Server(models, *FAKE, cold=True) as server:
        sing(server, models)
        engine = engine_of(server)
        assert server.stop() == 0
        assert not is_running(engine)


def test_row_55_sigterm_under_load(serve: Callable[..., Server], models: Path) -> None:
    """After SIGTERM: not ready at once, served on in the lame duck, told to close, nothing lost, exit 0."""
    server = serve(*FAKE, "--fake-ms", "2", "--lame-duck-s", "3")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(BOTH[number % 2](server)) for number in range(8)]
        askers = stack.enter_context(asking(*map(numbered_texts, clients, range(8))))
        server.signal(signal.SIGTERM)
        signalled = time.monotonic()
        wait_for(lambda: get(server.metrics, "/readyz").status == 503, "readiness to fall")
        fell = elapsed(signalled)
        assert health(server) == NOT_SERVING
        wait_for_more(askers, 21)  # a load balancer needs a while to notice; all that it still sends is served
    assert server.wait() == 0
    assert failures(askers) == []
    assert [asker.refused for asker in askers] == [[]] * len(askers)
    for asker in askers[0::2]:  # HTTP
        assert any(answer.headers.get("connection") == "close" for _, answer in asker.answers)
    for asker in askers:
        vectors = [answer.vectors[0] for _, answer in asker.answers]
        np.testing.assert_allclose(vectors, fake_answers(models, [text for text, _ in asker.answers]), atol=1e-5)
    assert fell < PROMPTLY_S


def test_row_55_keep_alive_ends_in_the_lame_duck(serve: Callable[..., Server]) -> None:
    """The first reply of a connection in the lame duck is its last."""
    server = serve(*FAKE, "--lame-duck-s", "5")
    with HttpConnection(server.http) as connection:
        headers = {"Content-Type": "application/json"}
        assert "connection" not in connection.call("POST", "/embed", SMALL, headers).headers
        server.signal(signal.SIGTERM)
        server.wait_logged("state: draining")
        reply = connection.call("POST", "/embed", SMALL, headers)
        assert reply.status == 200
        assert reply.headers["connection"] == "close"
    server.signal(signal.SIGTERM)  # enough of the lame duck
    assert server.wait() == 0


@pytest.fixture
def held_server(serve: Callable[..., Server]) -> Iterator[tuple[Server, Callable[[], None]]]:
    """A server whose engine stands still until the second element is called."""
    server = serve(*FAKE, "--drain-s", "1")
    with stopped_engine(server) as engine:
        yield server, lambda: os.kill(engine, signal.SIGCONT)


@contextlib.contextmanager
def both_asked(server: Server) -> Iterator[list[Future[Answer]]]:
    """One request over each wire, sent and admitted."""
    with ThreadPoolExecutor(2) as pool, Tei(server) as tei, Grpc(server) as grpc:
        asked = [pool.submit(client.embed, CANARY) for client in (tei, grpc)]
        wait_for(lambda: metric(server, "bertserve_admitted_tokens") == 2 * CANARY_TOKENS, "both to be admitted")
        yield asked


def test_row_55_requests_under_way_are_finished(held_server: tuple[Server, Callable[[], None]], models: Path) -> None:
    """What was admitted before the drain is answered within its limit."""
    server, go_on = held_server
    with both_asked(server) as asked:
        server.signal(signal.SIGTERM)
        server.wait_logged("state: draining")
        go_on()
        for reply in asked:
            np.testing.assert_allclose(reply.result().vectors, fake_answers(models, CANARY), atol=1e-5)
    assert server.wait() == 0


def test_row_56_new_connections_while_draining(held_server: tuple[Server, Callable[[], None]]) -> None:
    """Once the drain has begun, new connections are refused; the probes still answer."""
    server, go_on = held_server
    with both_asked(server):
        server.signal(signal.SIGTERM)
        server.wait_logged("state: draining")
        wait_for(lambda: not listening(server.http), "the HTTP port to close")
        wait_for(lambda: not listening(server.grpc), "the gRPC port to close")
        assert get(server.metrics, "/livez").status == 200
        go_on()
    assert server.wait() == 0


def test_row_57_requests_past_the_drain_limit(held_server: tuple[Server, Callable[[], None]]) -> None:
    """What cannot be finished within the limit is refused with 503 / UNAVAILABLE, not cut off; the exit code is 0."""
    server, _ = held_server
    with both_asked(server) as asked:
        server.signal(signal.SIGTERM)
        for reply, status in zip(asked, (503, "UNAVAILABLE"), strict=True):
            with pytest.raises(Refused) as refused:
                reply.result()
            assert refused.value.status == status
    assert server.wait() == 0


def test_row_57_a_client_that_does_not_read(serve: Callable[..., Server]) -> None:
    """A client that never reads its reply cannot hold the end beyond the drain's limit, nor disturb the log."""
    server = serve(*FAKE, "--drain-s", "1")
    body = json.dumps({"input": ["x"] * 2048, "model": "minilm"}).encode()
    with RawConnection(server.http) as connection:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.send(
            b"POST /v1/embeddings HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        wait_for(lambda: metric(server, "bertserve_requests_total", reason="ok") == 1, "the answer to be written")
        server.signal(signal.SIGTERM)
        assert server.wait(PROMPTLY_S) == 0
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_row_58_second_signal_ends_the_drain(held_server: tuple[Server, Callable[[], None]]) -> None:
    """A second signal during the drain does not make it longer than its limit."""
    server, _ = held_server
    with both_asked(server) as asked:
        server.signal(signal.SIGINT)
        server.wait_logged("state: draining")
        server.signal(signal.SIGINT)
        assert server.wait(PROMPTLY_S) == 0
        assert [type(reply.exception()) for reply in asked] == [Refused, Refused]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("warming", [False, True])
def test_row_58_signals_end_the_server_promptly(
    serve: Callable[..., Server], number: signal.Signals, *, warming: bool
) -> None:
    """Nobody uses it while it warms up, control-C drains at once, and a second SIGTERM skips the lame duck."""
    server = serve(*FAKE, *(LONG_WARM_UP if warming else ()), "--lame-duck-s", "60", wait_ready=not warming)
    server.wait_logged("state: warming")
    server.signal(number)
    if number is signal.SIGTERM and not warming:
        server.wait_logged("state: draining")
        server.signal(number)
    assert server.wait(PROMPTLY_S) == 0


def test_row_59_server_killed(serve: Callable[..., Server]) -> None:
    """When the server is killed, its engine process ends by itself."""
    server = serve(*FAKE)
    engine = engine_of(server)
    server.signal(signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    wait_for(lambda: not is_running(engine), "the engine to end", PROMPTLY_S)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("option", ["--http-port", "--grpc-port", "--metrics-port"])
def test_row_61_port_in_use(models: Path, option: str) -> None:
    """A port that is taken ends the start at once with one line that names it, and exit code 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ports = {"--http-port": "0", "--grpc-port": "0", "--metrics-port": "0"} | {option: port}
        started = time.monotonic()
        done = refused_start("--models", str(models), *[word for pair in ports.items() for word in pair])
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert port in line
    assert "in use" in line
    assert elapsed(started) < PROMPTLY_S


def test_row_61_address_that_is_not_ours(models: Path) -> None:
    """An address that the machine does not have is refused the same way."""
    done = refused_start("--models", str(models), "--host", "192.0.2.1", "--http-port", "0")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "192.0.2.1" in line
