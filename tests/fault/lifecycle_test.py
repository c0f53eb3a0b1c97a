"""Rows 54 to 61 of the failure modes: how the server starts, drains and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.canary import CANARY, sing
from tests.support.certificates import open_channel
from tests.support.clients import (
    BOTH,
    UPLOAD,
    Grpc,
    HttpConnection,
    RawConnection,
    Refused,
    Tei,
    get,
    metric,
    post_json,
)
from tests.support.expected import fake_answers
from tests.support.server import FAKE, Server, elapsed, is_running, listening, refused_start
from tests.support.stopping import stop
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.clients import Transport

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


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings", "/v2/models/minilm/infer"])
def test_row_54_http_request_before_ready(warming_server: Server, path: str) -> None:
    """A request during warm-up is 503 with `Retry-After`, at once."""
    body = {
        "/embed": {"inputs": "x"},
        "/v1/embeddings": {"input": "x", "model": "minilm"},
        "/v2/models/minilm/infer": {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["x"]}]},
    }[path]
    reply = post_json(warming_server.http, path, json.dumps(body).encode())
    assert reply.status == 503
    assert int(reply.headers["retry-after"]) >= 1


def test_row_54_grpc_request_before_ready(warming_server: Server) -> None:
    """The same over gRPC is UNAVAILABLE."""
    with Grpc(warming_server) as client, pytest.raises(Refused) as refused:
        client.embed(["x"])
    assert refused.value.status == "UNAVAILABLE"


def test_row_54_probes_before_ready(warming_server: Server) -> None:
    """Meanwhile the server is live and not ready, on both ports, and gRPC's health says NOT_SERVING."""
    for address in (warming_server.http, warming_server.metrics):
        assert get(address, "/livez").status == 200
        assert get(address, "/readyz").status == 503
    assert get(warming_server.http, "/v2/health/live").status == 200
    assert get(warming_server.http, "/v2/health/ready").status == 400
    assert get(warming_server.http, "/v2/models/minilm/ready").status == 400
    assert health(warming_server) == NOT_SERVING


def test_row_54_bad_input_before_ready(warming_server: Server) -> None:
    """A body that is nonsense stays the client's fault, whatever the server's state."""
    assert post_json(warming_server.http, "/embed", b"{").status == 400


def test_a_cold_start(models: Path) -> None:
    """A server that a shell starts, all of its imports included, gets ready, answers, and ends with 0 on SIGTERM."""
    with Server(models, *FAKE, cold=True) as server:
        sing(server, models)
        assert server.stop() == 0


class Client(threading.Thread):
    """Asks until told to stop, as behind a proxy that opens a new connection when told to close the old one."""

    def __init__(self, transport: type[Transport], server: Server, stop: threading.Event, number: int) -> None:
        super().__init__()
        self._transport = transport
        self._server = server
        self._stop_asking = stop
        self._number = number
        self.texts: list[str] = []
        self.vectors: list[np.ndarray] = []
        self.failures: list[Exception] = []
        self.said_close = 0

    def run(self) -> None:
        """Asks one after another."""
        with self._transport(self._server) as client:
            while not self._stop_asking.is_set():
                text = f"client {self._number}, request {len(self.texts)}"
                try:
                    answer = client.embed([text])
                except Exception as error:  # noqa: BLE001  every failure counts
                    self.failures.append(error)
                    return
                self.texts.append(text)
                self.vectors.append(answer.vectors[0])
                self.said_close += answer.headers.get("connection") == "close"


def test_row_55_sigterm_under_load(serve: Callable[..., Server], models: Path) -> None:
    """After SIGTERM: not ready at once, served on in the lame duck, told to close, nothing lost, exit 0."""
    server = serve(*FAKE, "--fake-ms", "2", "--lame-duck-s", "3")
    stop = threading.Event()
    clients = [Client(BOTH[number % 2], server, stop, number) for number in range(8)]
    for client in clients:
        client.start()
    wait_for(lambda: all(client.texts for client in clients), "load")
    server.signal(signal.SIGTERM)
    signalled = time.monotonic()
    wait_for(lambda: get(server.metrics, "/readyz").status == 503, "readiness to fall")
    fell = elapsed(signalled)
    assert health(server) == NOT_SERVING
    asked = [len(client.texts) for client in clients]
    # A load balancer needs a while to notice; all that it still sends is served.
    wait_for(
        lambda: all(len(c.texts) > n + 20 for c, n in zip(clients, asked, strict=True)), "answers in the lame duck"
    )
    http_clients = clients[0::2]
    assert all(client.said_close for client in http_clients)
    stop.set()
    for client in clients:
        client.join()
    assert server.wait() == 0
    assert [client.failures for client in clients] == [[]] * len(clients)
    for client in clients:
        np.testing.assert_allclose(client.vectors, fake_answers(models, client.texts), atol=1e-5)
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
def stopped_engine(serve: Callable[..., Server], tmp_path: Path) -> Iterator[tuple[Server, Callable[[], None]]]:
    """A server whose engine stands still until the second element is called."""
    server = serve(*FAKE, "--drain-s", "1", "--batch-dir", str(tmp_path))
    engine = server.engine_pid()
    assert engine is not None
    stop(engine)
    yield server, lambda: os.kill(engine, signal.SIGCONT)
    if is_running(engine):
        os.kill(engine, signal.SIGCONT)


class Asking(threading.Thread):
    def __init__(self, transport: type[Transport], server: Server) -> None:
        super().__init__()
        self._transport = transport
        self._server = server
        self.outcome: np.ndarray | Exception | None = None

    def run(self) -> None:
        """Asks."""
        with self._transport(self._server) as client:
            try:
                self.outcome = client.embed(CANARY).vectors
            except Exception as error:  # noqa: BLE001  kept for the test to judge
                self.outcome = error


def ask_all(server: Server) -> list[Asking]:
    asking = [Asking(transport, server) for transport in BOTH]
    for thread in asking:
        thread.start()
    wait_for(lambda: metric(server, "bertserve_admitted_tokens") == len(asking) * CANARY_TOKENS, "both to be admitted")
    return asking


def test_row_55_requests_under_way_are_finished(
    stopped_engine: tuple[Server, Callable[[], None]], models: Path
) -> None:
    """What was admitted before the drain is answered within its limit."""
    server, go_on = stopped_engine
    asking = ask_all(server)
    server.signal(signal.SIGTERM)
    server.wait_logged("state: draining")
    go_on()
    for thread in asking:
        thread.join()
        assert isinstance(thread.outcome, np.ndarray), thread.outcome
        np.testing.assert_allclose(thread.outcome, fake_answers(models, CANARY), atol=1e-5)
    assert server.wait() == 0


def test_row_56_new_connections_while_draining(stopped_engine: tuple[Server, Callable[[], None]]) -> None:
    """Once the drain has begun, new connections are refused; the probes still answer."""
    server, go_on = stopped_engine
    asking = ask_all(server)
    server.signal(signal.SIGTERM)
    server.wait_logged("state: draining")
    wait_for(lambda: not listening(server.http), "the HTTP port to close")
    wait_for(lambda: not listening(server.grpc), "the gRPC port to close")
    assert get(server.metrics, "/livez").status == 200
    go_on()
    for thread in asking:
        thread.join()
    assert server.wait() == 0


def test_row_57_requests_past_the_drain_limit(
    stopped_engine: tuple[Server, Callable[[], None]], tmp_path: Path
) -> None:
    """What cannot be finished within the limit is refused with 503 / UNAVAILABLE, not cut off; the exit code is 0."""
    server, _ = stopped_engine
    incoming = tmp_path / "incoming"
    asking = ask_all(server)
    with RawConnection(server.http) as upload:
        upload.send(UPLOAD % b"" + b"x" * 400)
        wait_for(lambda: list(incoming.iterdir()), "the upload")
        server.signal(signal.SIGTERM)
        assert upload.status() == 503
    for thread, status in zip(asking, (503, "UNAVAILABLE"), strict=True):
        thread.join()
        assert isinstance(thread.outcome, Refused), thread.outcome
        assert thread.outcome.status == status
    assert server.wait() == 0
    assert list(incoming.iterdir()) == []


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


def test_row_58_second_signal_ends_the_lame_duck(serve: Callable[..., Server]) -> None:
    """A second SIGTERM skips the rest of the lame duck."""
    server = serve(*FAKE, "--lame-duck-s", "60")
    server.signal(signal.SIGTERM)
    server.wait_logged("state: draining")
    server.signal(signal.SIGTERM)
    assert server.wait(PROMPTLY_S) == 0


def test_row_58_sigint_has_no_lame_duck(serve: Callable[..., Server]) -> None:
    """Control-C drains at once."""
    server = serve(*FAKE, "--lame-duck-s", "60")
    server.signal(signal.SIGINT)
    assert server.wait(PROMPTLY_S) == 0


@pytest.mark.long
def test_row_58_second_signal_ends_the_drain(stopped_engine: tuple[Server, Callable[[], None]]) -> None:
    """A second signal during the drain does not make it longer than its limit."""
    server, _ = stopped_engine
    asking = ask_all(server)
    server.signal(signal.SIGINT)
    server.wait_logged("state: draining")
    server.signal(signal.SIGINT)
    assert server.wait(PROMPTLY_S) == 0
    for thread in asking:
        thread.join()
        assert isinstance(thread.outcome, Refused)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_row_58_signal_during_start(serve: Callable[..., Server], number: signal.Signals) -> None:
    """A signal during warm-up ends the server promptly: nobody can be using it yet."""
    server = serve(*FAKE, *LONG_WARM_UP, "--lame-duck-s", "60", wait_ready=False)
    server.wait_logged("state: warming")
    server.signal(number)
    assert server.wait(PROMPTLY_S) == 0


def test_row_59_server_killed(serve: Callable[..., Server]) -> None:
    """When the server is killed, its engine process ends by itself."""
    server = serve(*FAKE)
    engine = server.engine_pid()
    assert engine is not None
    server.signal(signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    wait_for(lambda: not is_running(engine), "the engine to end", PROMPTLY_S)


@pytest.mark.long
def test_row_59_server_ended(serve: Callable[..., Server]) -> None:
    server = serve(*FAKE)
    engine = server.engine_pid()
    assert engine is not None
    assert server.stop() == 0
    assert not is_running(engine)


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


def test_ready_state_over_every_probe(fake_server: Server, models: Path) -> None:
    for address in (fake_server.http, fake_server.metrics):
        assert get(address, "/livez").status == get(address, "/readyz").status == 200
    assert get(fake_server.http, "/v2/health/ready").status == 200
    assert health(fake_server) == SERVING
    sing(fake_server, models)


def test_probe_port_serves_nothing_else(fake_server: Server) -> None:
    """The port of probes and metrics takes no requests for inference."""
    assert post_json(fake_server.metrics, "/embed", SMALL).status == 404
    with Tei(fake_server) as client:
        assert client.embed(["x"]).vectors.shape[0] == 1
