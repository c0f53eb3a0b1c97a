"""How long a connection is used: replicas that come later get their share of the load, and nobody loses a request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from h2.errors import ErrorCodes
from hyperframe.frame import GoAwayFrame, PingFrame

from loadtest.generator import frames as wire
from loadtest.generator.frames import frame
from tests.support.clients import HttpConnection
from tests.support.http2 import RawHttp2
from tests.support.server import Server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIVE = "/inference.GRPCInferenceService/ServerLive"
ANY_STREAM = 2**31 - 1
SMALL = json.dumps({"inputs": "small"}).encode()


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    """A server whose connections live for about a second."""
    with Server(models, *("--engine", "fake", "--precision", "fp32", "--max-connection-age-s", "1")) as running:
        yield running


def test_grpc_connection_that_is_old_enough(server: Server) -> None:
    """GOAWAY that still takes every stream; once the client has heard it, one that names the last; then the end."""
    with RawHttp2(server.grpc) as connection:
        connection.call(1, b"", LIVE)
        assert connection.reply(1).status == 0
        farewell = connection.await_frame(GoAwayFrame)
        ping = connection.await_frame(PingFrame)
        assert (farewell.last_stream_id, farewell.error_code) == (ANY_STREAM, ErrorCodes.NO_ERROR)
        connection.call(3, b"", LIVE)  # was on its way
        assert connection.reply(3).status == 0
        connection.send(frame(wire.PING, wire.ACK, 0, ping.opaque_data))
        last = connection.await_frame(GoAwayFrame)
        assert (last.last_stream_id, last.error_code) == (3, ErrorCodes.NO_ERROR)
        assert list(connection.frames()) == []


def test_grpc_client_opens_another_connection(server: Server) -> None:
    """A client of gRPC's own library goes over to a new connection between two calls, none of which fails."""
    states: list[grpc.ChannelConnectivity] = []
    with grpc.insecure_channel(server.grpc) as channel:
        channel.subscribe(states.append)
        health = health_pb2_grpc.HealthStub(channel)

        def reconnected() -> bool:
            reply = health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            return states.count(grpc.ChannelConnectivity.READY) > 1

        wait_for(reconnected, "a second connection")
    assert grpc.ChannelConnectivity.TRANSIENT_FAILURE not in states


def test_http_connection_that_is_old_enough(server: Server) -> None:
    """A reply asks the client to close, and every request before it is answered on the one connection."""
    with HttpConnection(server.http) as connection:

        def told_to_close() -> bool:
            reply = connection.call("POST", "/embed", SMALL, {"Content-Type": "application/json"})
            assert reply.status == 200
            return reply.headers.get("connection") == "close"

        wait_for(told_to_close, "the connection's last reply")
