"""Row 55 over a network: a server ends while its clients, a round trip away, have not heard of it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import grpc
import pytest
from h2.errors import ErrorCodes
from hyperframe.frame import GoAwayFrame

from tests.support.asking import asking, failures, wait_for_more
from tests.support.certificates import Certificates
from tests.support.clients import MODEL_INFER, TIMEOUT_S, Grpc, HttpConnection, RawConnection, infer_request
from tests.support.delaying_proxy import DelayingProxy
from tests.support.http2 import RawHttp2, opened_streams
from tests.support.server import FAKE, Server, listening
from tests.support.stopping import stop
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.asking import Asker

ONE_WAY_S = 0.025
CLIENTS = 12
"""Of each wire; those of gRPC share a connection."""
WAITING = 48
"""Connections of each wire: several turns of the server's loop."""
SERVER_LIVE = "/inference.GRPCInferenceService/ServerLive"
ASKED = (
    b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 19\r\n\r\n"
    b'{"inputs": "small"}'
)


def embed(connection: HttpConnection) -> None:
    """Asks, and takes nothing but an answer; opens another connection when it was told to close this one."""
    reply = connection.call("POST", "/embed", b'{"inputs": "small"}', {"Content-Type": "application/json"})
    assert reply.status == 200, reply.body


@contextmanager
def clients(server: Server) -> Iterator[tuple[DelayingProxy, DelayingProxy, list[Asker[object]]]]:
    """Clients of a server, each way to it with a delay; in the end, each call that crossed the wire has an answer.

    gRPC's client fails or repeats a call that it has begun when GOAWAY comes, and that it has never sent. It repeats
    one that the server refused, too: then the call crosses the wire twice.
    """
    with (
        DelayingProxy(server.http, ONE_WAY_S) as http,
        DelayingProxy(server.grpc, ONE_WAY_S) as wire,
        grpc.insecure_channel(wire.address) as channel,
    ):
        message = infer_request(["small"]).SerializeToString()
        infer = channel.unary_unary(MODEL_INFER)
        asks = [lambda: infer(message, timeout=TIMEOUT_S)] * CLIENTS
        asks += [partial(embed, HttpConnection(http.address)) for _ in range(CLIENTS)]
        with asking(*asks) as askers:
            yield http, wire, askers
        assert sum(map(opened_streams, wire.sent)) == sum(len(asker.answers) for asker in askers[:CLIENTS])


def connect(address: str) -> socket.socket:
    """A connection that is complete for its client, whether or not the server runs."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def restart(
    server: Server, other: Server, http: DelayingProxy, wire: DelayingProxy, steady: list[Asker[object]]
) -> None:
    """New connections go to another server from now on, then this one ends."""
    http.target, wire.target = other.http, other.grpc
    wait_for_more(steady, 2, TIMEOUT_S)  # connections that were opened just before have arrived
    assert server.stop() == 0
    wait_for_more(steady, 2, TIMEOUT_S)
    assert failures(steady) == []


@pytest.mark.parametrize(
    ("restarts", "busy"), [pytest.param(5, 0, id="few"), pytest.param(200, 6, id="many", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("lame_duck_s", ["0", "0.5"])
def test_row_55_restarts_a_round_trip_away(models: Path, lame_duck_s: str, restarts: int, busy: int) -> None:
    """What is sent before its client can have heard of the end is answered, on a busy machine as well."""
    with ExitStack() as stack:
        for _ in range(busy):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        server = stack.enter_context(Server(models, *FAKE, "--lame-duck-s", lame_duck_s))
        http, wire, steady = stack.enter_context(clients(server))
        for _ in range(restarts):
            other = stack.enter_context(Server(models, *FAKE, "--lame-duck-s", lame_duck_s))
            restart(server, other, http, wire, steady)
            server = other


def test_row_55_a_network_that_stands_still(models: Path) -> None:
    """A call that was sent before its client heard of the end is answered, however long both were on their way."""
    with (
        Server(models, *FAKE) as server,
        DelayingProxy(server.grpc, 0.0) as wire,
        grpc.insecure_channel(wire.address, options=[("grpc.enable_retries", 0)]) as channel,
        Grpc(server) as direct,
    ):
        message = direct.request(["small"]).SerializeToString()
        infer = channel.unary_unary(MODEL_INFER)
        infer(message, timeout=TIMEOUT_S)
        wire.hold()
        late = infer.future(message, timeout=TIMEOUT_S)
        server.signal(signal.SIGTERM)
        wait_for(lambda: not listening(server.grpc), "the port to close")
        time.sleep(3.0)  # two ticks and more: a server that only counts time has ended the connection
        wire.go_on()
        assert late.result()
        assert server.wait() == 0


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_row_55_connections_that_wait_to_be_accepted(models: Path, tmp_path: Path, *, secured: bool) -> None:
    """A server that ends takes the connections that its clients have opened, and answers what these ask."""
    with (
        Server(models, *FAKE, tls=Certificates(tmp_path) if secured else None) as server,
        ThreadPoolExecutor(2 * WAITING) as pool,
    ):
        with Grpc(server) as client:
            message = client.request(["small"]).SerializeToString()

        def ask_http(opened: socket.socket) -> int:
            with RawConnection(server.http, opened=opened) as connection:
                connection.send(ASKED)
                return connection.status()

        def ask_grpc(opened: socket.socket) -> int | None:
            with RawHttp2(server.grpc, opened=opened) as connection:
                connection.call(1, message)
                return connection.reply(1).status

        stop(server.pid)
        opened = [connect(address) for address in (server.http, server.grpc) for _ in range(WAITING)]
        asked = [pool.submit(ask_http, one) for one in opened[:WAITING]]
        asked += [pool.submit(ask_grpc, one) for one in opened[WAITING:]]
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGCONT)
        assert [one.result() for one in asked] == [200] * WAITING + [0] * WAITING
        assert server.wait() == 0


def test_row_57_a_client_that_does_not_answer_the_ping(models: Path) -> None:
    """It holds the end until the drain's limit; then it is told which call was the last, which is answered."""
    with Server(models, *FAKE, "--drain-s", "3") as server, RawHttp2(server.grpc) as connection:
        connection.call(1, b"", SERVER_LIVE)
        assert connection.reply(1).status == 0
        server.signal(signal.SIGTERM)
        connection.await_frame(GoAwayFrame)
        connection.call(3, b"", SERVER_LIVE)
        assert connection.reply(3).status == 0
        last = connection.await_frame(GoAwayFrame)
        assert (last.last_stream_id, last.error_code) == (3, ErrorCodes.NO_ERROR)
        assert list(connection.frames()) == []
        assert server.wait() == 0
