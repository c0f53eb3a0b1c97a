"""Connections: how old and how many they get, and how they end; nobody who is served loses a request or a reply."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import resource
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import h11
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from h2.errors import ErrorCodes
from hyperframe.frame import GoAwayFrame, PingFrame

from bertserve.loadtest.generator import frames as wire
from bertserve.loadtest.generator.frames import PREFACE, frame, settings
from bertserve.serving.net.lingering_close import LingeringClose
from tests.support.asking import asking, failures, wait_for_more
from tests.support.certificates import Certificates
from tests.support.clients import Grpc, HttpConnection, RawConnection, get, http_call, metric, metrics
from tests.support.credentials import FIRST, bearer, write_keys
from tests.support.engines import engine_of, kill_engine
from tests.support.grpc_peer import Wire
from tests.support.http2 import RawHttp2
from tests.support.server import FAKE, START_LIMIT_S, Server, refused_start
from tests.support.waiting import until, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator


LIVE = "/inference.GRPCInferenceService/ServerLive"
ANY_STREAM = 2**31 - 1
SMALL = json.dumps({"inputs": "small"}).encode()


@pytest.fixture(scope="module")
def aging_server(models: Path) -> Iterator[Server]:
    """A server whose connections live for about a second."""
    with Server(models, *("--engine", "fake", "--precision", "fp32", "--max-connection-age-s", "1")) as running:
        yield running


def test_grpc_connection_that_is_old_enough(aging_server: Server) -> None:
    """GOAWAY that still takes every stream; once the client has heard it, one that names the last; then the end."""
    with RawHttp2(aging_server.grpc) as connection:
        connection.call(1, b"", LIVE)
        assert connection.reply(1).status == 0
        farewell = connection.await_frame(GoAwayFrame)
        ping = connection.await_frame(PingFrame)
        assert (farewell.last_stream_id, farewell.error_code) == (ANY_STREAM, ErrorCodes.NO_ERROR)
        connection.call(3, b"", LIVE)  # was on its way
        assert connection.reply(3).status == 0
        connection.send(frame(wire.PING, wire.ACK, 0, ping.opaque_data))
        ping = connection.await_frame(PingFrame)
        connection.send(frame(wire.PING, wire.ACK, 0, ping.opaque_data))
        last = connection.await_frame(GoAwayFrame)
        assert (last.last_stream_id, last.error_code) == (3, ErrorCodes.NO_ERROR)
        assert list(connection.frames()) == []


def test_grpc_client_opens_another_connection(aging_server: Server) -> None:
    """A client of gRPC's own library goes over to a new connection between two calls, none of which fails."""
    states: list[grpc.ChannelConnectivity] = []
    with grpc.insecure_channel(aging_server.grpc) as channel:
        channel.subscribe(states.append)
        health = health_pb2_grpc.HealthStub(channel)

        def reconnected() -> bool:
            reply = health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            return states.count(grpc.ChannelConnectivity.READY) > 1

        wait_for(reconnected, "a second connection")
    assert grpc.ChannelConnectivity.TRANSIENT_FAILURE not in states


def test_http_connection_that_is_old_enough(aging_server: Server) -> None:
    """A reply asks the client to close, and every request before it is answered on the one connection."""
    with HttpConnection(aging_server.http) as connection:

        def told_to_close() -> bool:
            reply = connection.call("POST", "/embed", SMALL, {"Content-Type": "application/json"})
            assert reply.status == 200
            return reply.headers.get("connection") == "close"

        wait_for(told_to_close, "the connection's last reply")


EMBED = b'{"inputs": "polite"}'
JSON = {"Content-Type": "application/json"}
ASKED = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(autouse=True, scope="module")
def _many_files() -> Iterator[None]:
    """The attacker here holds more than a thousand sockets."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def flood(address: str, connections: int, first: bytes, held: contextlib.ExitStack) -> None:
    """Opens connections, each of which sends something and then nothing more, and holds them."""
    host, _, port = address.rpartition(":")
    for _ in range(connections):
        with contextlib.suppress(OSError):
            one = held.enter_context(socket.create_connection((host, int(port)), timeout=10))
            one.sendall(first)


def wait_live(address: str) -> None:
    """Waits until a new connection is answered: what is idle has its place for half a second."""

    def live() -> bool:
        try:
            return get(address, "/livez").status == 200
        except OSError:  # without TLS it would be told
            return False

    wait_for(live, "a place")


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.parametrize(
    ("port", "first"),
    [
        pytest.param("http", b"", marks=pytest.mark.slow),
        ("http", ASKED),
        pytest.param("grpc", b"", marks=pytest.mark.slow),
        pytest.param("grpc", PREFACE + settings(), marks=pytest.mark.slow),
    ],
)
def test_idle_connections_beyond_the_bound_harm_nobody(models: Path, port: str, first: bytes) -> None:
    """A client that asks keeps its connection, probes answer, an engine that dies comes back, and the log says why."""
    with (
        Server(models, *FAKE, files=(1024, 1024)) as server,
        contextlib.ExitStack() as held,
        HttpConnection(server.http) as connection,
        asking(lambda: connection.call("POST", "/embed", EMBED, JSON), rest_s=0.01) as polite,
    ):
        flood(getattr(server, port), 1500, first, held)
        assert get(server.metrics, "/livez").status == 200
        engine = kill_engine(server)
        wait_for(lambda: server.engine_pid() not in {None, engine}, "another engine", START_LIMIT_S)
        server.wait_state()
        flood(getattr(server, port), 100, first, held)
        wait_for_more(polite, 10)
        assert get(server.metrics, "/readyz").status == 200
        wait_live(server.http)
        assert open_files(server.pid) < 1024
        displaced = metric(server, "bertserve_connections_displaced_total", ports="clients")
    assert displaced > 0
    assert failures(polite) == []
    assert {reply.status for reply in polite[0].answers} <= {200, 503}  # while there was no engine
    assert not any("connection" in reply.headers for reply in polite[0].answers)  # all of them on the same connection
    assert "(--max-connections)" in server.log
    assert "unhandled exception" not in server.log


def test_the_soft_limit_of_files_is_raised(models: Path) -> None:
    """To the hard one, from which the number of connections follows."""
    with Server(models, *FAKE, files=(400, 3000)) as server:
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        assert (soft, hard) == (3000, 3000)
        limit = metric(server, "bertserve_connections_limit", ports="clients")
    assert 2000 < limit < 3000


@pytest.mark.parametrize(
    ("files", "options"), [(400, ["--max-connections", "5000"]), pytest.param(64, [], marks=pytest.mark.slow)]
)
def test_a_bound_that_the_limit_of_files_does_not_allow_is_refused(
    models: Path, files: int, options: list[str]
) -> None:
    """One line says how many files are needed and how many there may be."""
    ended = refused_start("--models", str(models), *FAKE, *options, files=(files, files))
    assert ended.returncode == 1
    assert f"open files, but the limit is {files}; raise the hard limit" in ended.stderr


def test_a_connection_without_a_place_is_refused_where_none_is_idle(models: Path) -> None:
    """It is told so; those that have something under way keep theirs; a place that comes free is taken."""
    with Server(models, *FAKE, "--max-connections", "3") as server, contextlib.ExitStack() as held:
        begun = [held.enter_context(RawConnection(server.http)) for _ in range(3)]
        for connection in begun:
            connection.send(b"POST /embed HTTP/1.1\r\nHost: x\r\n")
        wait_for(lambda: metric(server, "bertserve_connections", protocol="http") == 3, "three connections")
        reply = get(server.http, "/livez")
        assert (reply.status, reply.headers["connection"], reply.headers["retry-after"]) == (503, "close", "1")
        assert reply.json()["error"]["reason"] == "not_ready"
        with RawConnection(server.grpc) as refused:
            refused.read_to_end()
        assert metric(server, "bertserve_connections_refused_total", ports="clients", reason="full") == 2
        assert metric(server, "bertserve_connections_displaced_total", ports="clients") == 0
        wait_for(lambda: "rejected a connection: all connections are in use" in server.log, "its line in the log")
        begun[0].send(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(EMBED), EMBED))
        assert begun[0].socket.recv(1 << 16).startswith(b"HTTP/1.1 200")
        wait_live(server.http)  # in the place of the one that is idle now
        begun[1].socket.close()
        begun[2].socket.close()
        wait_for(lambda: metric(server, "bertserve_connections", protocol="http") == 0, "their end")
        assert get(server.http, "/livez").status == 200


def test_the_longest_idle_gives_way(models: Path) -> None:
    """Not the one that was used last, although it was opened first."""
    with (
        Server(models, *FAKE, "--max-connections", "2") as server,
        HttpConnection(server.http) as first,
        HttpConnection(server.http) as second,
    ):
        for connection in (first, second):
            assert connection.call("GET", "/livez").status == 200
        wait_for(lambda: first.call("GET", "/livez").status == get(server.http, "/livez").status, "a place")
        assert first.call("GET", "/livez").status == 200
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            second.call("GET", "/livez")


def test_an_idle_grpc_connection_says_goodbye_and_its_client_does_not_notice(models: Path) -> None:
    """GOAWAY without an error; the next call of the same channel is answered."""
    with Server(models, *FAKE, "--max-connections", "1") as server:
        with Grpc(server) as client:
            client.embed(["a"])
            wait_live(server.http)
            assert metric(server, "bertserve_connections_displaced_total", ports="clients") >= 1
            client.embed(["b"])
        for protocol in ("http", "grpc"):
            wait_for(lambda p=protocol: not metric(server, "bertserve_connections", protocol=p), "a place")
        with RawHttp2(server.grpc) as connection:
            wait_for(lambda: metric(server, "bertserve_connections", protocol="grpc") == 1, "the connection")
            wait_live(server.http)
            assert connection.goaway() == 0


def test_a_connection_that_waits_for_its_clients_end_gives_way(models: Path) -> None:
    """Its client has received all that it was told."""
    with Server(models, *FAKE, "--max-connections", "1") as server, RawConnection(server.http) as told:
        told.send(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert told.read_to_end().startswith(b"HTTP/1.1 200 ")
        wait_live(server.http)
        assert metric(server, "bertserve_connections_displaced_total", ports="clients") == 1


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def test_a_handshake_that_does_not_go_on_gives_way(models: Path, certificates: Certificates) -> None:
    """It holds a descriptor, though it is no connection yet."""
    with Server(models, *FAKE, "--max-connections", "2", tls=certificates) as server, contextlib.ExitStack() as held:
        flood(server.http, 2, b"", held)
        wait_live(server.http)
        assert metric(server, "bertserve_connections_displaced_total", ports="clients") >= 1


def test_probes_have_places_of_their_own(models: Path) -> None:
    """Whoever holds connections there idly gives way to a probe too."""
    with Server(models, *FAKE) as server, contextlib.ExitStack() as held:
        flood(server.metrics, 150, ASKED, held)
        wait_live(server.metrics)
        assert metric(server, "bertserve_connections_displaced_total", ports="probes") > 0


@pytest.mark.slow
def test_an_engine_that_cannot_be_started_for_lack_of_descriptors_is_started_later(models: Path) -> None:
    """The server lives on and says why it waits; when there are descriptors again, it serves."""
    with Server(models, *FAKE) as server, HttpConnection(server.metrics) as probe:
        assert probe.call("GET", "/livez").status == 200
        engine = engine_of(server)
        before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (8, before[1]))
        os.kill(engine, signal.SIGKILL)
        server.wait_logged("its process cannot be started: Too many open files", START_LIMIT_S)
        assert probe.call("GET", "/livez").status == 200
        assert probe.call("GET", "/readyz").status == 503
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
        server.wait_state()
        with HttpConnection(server.http) as connection:
            assert connection.call("POST", "/embed", EMBED, JSON).status == 200


PAGE = "https://app.example"
LARGE = b"GET /openapi.json HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer %b\r\n" % FIRST.encode()


@pytest.fixture(scope="module", params=["plain", "tls"])
def server(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keys")
    keys = write_keys(folder / "keys", FIRST)
    options = ("--access-log", "true", "--api-keys-file", str(keys), "--cors-origins", PAGE)
    tls = Certificates(folder) if request.param == "tls" else None
    with Server(models, *FAKE, *options, tls=tls) as running:
        yield running


@pytest.mark.parametrize("behind", [b"\r\n", b"GET /livez HTTP/1.1\r\nHost: test\r\n\r\n", b"x" * 100_000])
def test_what_is_sent_behind_the_last_request_cuts_no_reply(server: Server, behind: bytes) -> None:
    """A reply that ends the connection is read whole, however slowly, whatever its client still sends."""
    with RawConnection(server.http, receive_bytes=8192) as connection:
        identity = f"cut-{len(behind)}"
        connection.send(LARGE + f"X-Request-Id: {identity}\r\nConnection: close\r\n\r\n".encode())
        wait_for(lambda: identity in server.log, "the end of the request")
        connection.send(behind)
        reply = connection.read_to_end()
    head, _, body = reply.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None
    assert len(body) == int(length[1]) > 100_000


REFUSED = {
    # The request's line, its last field, and what is behind its head.
    "no_host": (400, "malformed_request", "GET /livez", "", b""),
    "no_field": (400, "malformed_request", "GET /livez", "Host: test\r\nA B: c", b""),
    "no_host_for_head": (400, "malformed_request", "HEAD /livez", "", b""),
    "headers_for_head": (431, "headers_too_large", "HEAD /livez", "Host: test\r\nX-A: " + "v" * 20_000, b""),
    "no_key": (401, "invalid_api_key", "POST /embed", "Host: test\r\nContent-Length: 2", b"{}"),
    "no_key_for_head": (401, "invalid_api_key", "HEAD /status", "Host: test", b""),
    "slow": (408, "slow_request", "POST /embed", "KEY\r\nHost: test\r\nContent-Length: 2", b"{"),
    "too_large": (413, "body_too_large", "POST /embed", "KEY\r\nHost: test\r\nContent-Length: 99999999", b""),
    "headers": (431, "headers_too_large", "GET /livez", "Host: test\r\nX-A: " + "v" * 60_000, b""),
    "coding": (501, "unsupported", "POST /embed", "KEY\r\nHost: test\r\nTransfer-Encoding: gzip, chunked", b""),
    "no_route": (404, "not_found", "GET /nothing", "KEY\r\nHost: test\r\nConnection: close", b""),
    "no_json": (
        400,
        "malformed_request",
        "POST /embed",
        "KEY\r\nHost: test\r\nConnection: close\r\nContent-Length: 1",
        b"{",
    ),
}


def counted(server: Server) -> dict[str, float]:
    return {name: value for name, value in metrics(server).items() if name.startswith("bertserve_requests_total")}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_of_every_layer_is_a_reply_like_any(server: Server, name: str) -> None:
    """It has the client's id, what pages and balancers read, a line of the access log and a count of its own."""
    status, reason, line, last, behind = REFUSED[name]
    last = last.replace("KEY", f"Authorization: Bearer {FIRST}\r\nContent-Type: application/json")
    before = counted(server)
    identity = f"refused-{name}"
    with RawConnection(server.http) as connection:
        head = f"{line} HTTP/1.1\r\nX-Request-Id: {identity}\r\nOrigin: {PAGE}\r\n{last}\r\n\r\n"
        connection.send(head.encode() + behind)
        received = connection.read_to_end()
    reader = h11.Connection(h11.CLIENT)
    method = line.split()[0]
    reader.send(h11.Request(method=method, target="/", headers=[("Host", "test")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(received)
    reply = reader.next_event()
    assert isinstance(reply, h11.Response)
    body = b""
    while isinstance(event := reader.next_event(), h11.Data):
        body += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    assert reader.trailing_data[0] == b""
    fields = dict(reply.headers)
    assert reply.status_code == status
    assert fields[b"x-request-id"] == identity.encode()
    assert fields[b"access-control-allow-origin"] == PAGE.encode()
    assert fields[b"date"]  # RFC 9110, section 6.6.1: as any reply of a server with a clock
    assert bool(body) == (method != "HEAD")
    assert int(fields[b"content-length"]) > 0
    wait_for(lambda: f"bertserve.access: request request_id={identity} " in server.log, "the line of the access log")
    (logged,) = [each for each in server.log.splitlines() if f"access: request request_id={identity} " in each]
    route = "?" if name == "no_route" else line.split()[1]
    assert f"method={method} route={route} status={status} reason={reason} " in logged
    assert f"bytes_out={len(body)}" in logged.split()
    after = counted(server)
    changed = {name: after[name] - before.get(name, 0.0) for name in after if after[name] != before.get(name, 0.0)}
    assert changed == {f'bertserve_requests_total{{model="",protocol="http",reason="{reason}"}}': 1.0}


def test_a_browsers_question_before_a_request_has_a_line_too(server: Server) -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "X-Request-Id": "preflight"}
    reply = http_call(server.http, "OPTIONS", "/embed", headers=asked)
    assert (reply.status, reply.headers["x-request-id"]) == (200, "preflight")
    wait_for(lambda: "request_id=preflight protocol=http method=OPTIONS route=/embed" in server.log, "the line")


def test_an_answer_is_one_line_and_one_count(server: Server) -> None:
    before = counted(server)
    reply = http_call(
        *(server.http, "POST", "/embed", b'{"inputs": "a"}'),
        headers={"Content-Type": "application/json", "X-Request-Id": "answered", **bearer(FIRST)},
    )
    assert reply.status == 200
    wait_for(lambda: "request_id=answered" in server.log, "the line")
    after = counted(server)
    ok = 'bertserve_requests_total{model="minilm",protocol="http",reason="ok"}'
    assert after == before | {ok: before[ok] + 1}


class Stuck(Wire):
    """A transport whose client takes nothing of what is in its buffer."""

    def get_extra_info(self, name: str, default: object = None) -> object:  # noqa: ARG002  asyncio's
        return default


def test_a_farewell_ends() -> None:
    """When the client has had its time, when it takes nothing, or when it sends without end."""

    async def ends(buffered: int, received: int) -> float:
        wire, loop = Stuck(), asyncio.get_running_loop()
        wire.buffered = buffered
        began = loop.time()
        farewell = LingeringClose(wire, quiet_s=0.02, pace_s=0.06)
        farewell.received(received)
        await until(lambda: wire.closed, "the end")
        farewell.cancel()
        return loop.time() - began

    async def all_ends() -> None:
        assert await ends(0, 100) > 0.015
        assert await ends(1000, 100) > 0.055
        assert await ends(0, 1 << 30) < await ends(1000, 100)

    asyncio.run(all_ends())
