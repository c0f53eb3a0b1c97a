"""The metrics port: probes, metrics and gRPC's health service on one port, which asks for neither key nor TLS."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.clients import RawConnection, Refused, get, grpc_raw, post_json
from tests.support.http2 import RawHttp2
from tests.support.server import elapsed
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.server import Server

CHECK = "/grpc.health.v1.Health/Check"
SERVING = health_pb2.HealthCheckResponse(status="SERVING").SerializeToString()


def test_both_protocols_are_answered(fake_server: Server) -> None:
    """Prometheus and kubelets' HTTP probes beside their gRPC probes."""
    for path in ("/livez", "/readyz", "/metrics"):
        assert get(fake_server.metrics, path).status == 200
    assert grpc_raw(fake_server.metrics, CHECK, b"") == SERVING


def test_first_bytes_one_by_one(fake_server: Server) -> None:
    """However the network cuts the beginning."""
    with RawConnection(fake_server.metrics) as connection:
        for byte in b"GET /livez HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n":
            connection.send(bytes([byte]))
        assert connection.status() == 200
    with RawHttp2(fake_server.metrics) as connection:
        connection.call(1, b"", CHECK)
        assert connection.reply(1).status == 0


@pytest.mark.parametrize("begun", [b"", b"P", b"PRI", b"PRI * HTTP/2.0\r\n", b"G", b"GET /livez"])
def test_a_connection_that_says_too_little_ends(fake_server: Server, begun: bytes) -> None:
    """After the time that headers have."""
    started = time.monotonic()
    with RawConnection(fake_server.metrics, timeout_s=8) as connection:
        connection.send(begun)
        connection.read_to_end()
    assert elapsed(started) < 8


def test_other_bytes_are_refused(fake_server: Server) -> None:
    """What is neither gets 400 or the end of the connection."""
    for data, status in ((b"PRESIDENT / HTTP/1.1\r\n\r\n", 400), (b"\x16\x03\x01\x02", 400), (b"PRI / HTTP/1.1", 0)):
        with RawConnection(fake_server.metrics) as connection:
            connection.send(data)
            assert connection.status() == status


@pytest.mark.parametrize("call", ["/inference.GRPCInferenceService/ModelInfer", "/grpc.health.v1.Health/Other"])
def test_only_health_is_there(fake_server: Server, call: str) -> None:
    """Nothing infers on this port, over neither protocol."""
    with pytest.raises(Refused) as refused:
        grpc_raw(fake_server.metrics, call, b"")
    assert refused.value.status == "UNIMPLEMENTED"
    assert post_json(fake_server.metrics, "/embed", b'{"inputs": "x"}').status == 404


def test_nothing_large_is_read(fake_server: Server) -> None:
    """4 KiB are more than any question here has."""
    assert post_json(fake_server.metrics, "/metrics", b" " * 5000).status == 413
    with pytest.raises(Refused) as refused:
        grpc_raw(fake_server.metrics, CHECK, b" " * 5000)
    assert refused.value.status == "RESOURCE_EXHAUSTED"


def test_health_follows_the_server_on_both_ports(serve: Callable[..., Server]) -> None:
    """A watcher hears of the drain, on either port; the process ends well with both connections open."""
    server = serve("--engine", "fake", "--lame-duck-s", "1")
    with ThreadPoolExecutor() as pool:

        def watch(address: str) -> tuple[list[int], str]:
            with grpc.insecure_channel(address) as channel:
                told = []
                try:
                    for reply in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                        told.append(reply.status)
                        if len(told) == 1:
                            started.append(address)
                except grpc.RpcError as error:
                    return told, error.code().name
                return told, "OK"

        started: list[str] = []
        watchers = [pool.submit(watch, address) for address in (server.grpc, server.metrics)]
        wait_for(lambda: len(started) == 2, "both to be told the first time")
        server.signal(signal.SIGTERM)
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        for watcher in watchers:
            assert watcher.result(20) == ([serving, not_serving], "UNAVAILABLE")
    assert server.wait() == 0
