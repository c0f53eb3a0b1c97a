"""Connections beyond the bound and descriptors that run out: clients that are served stay served, and so do probes."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loadtest.generator.frames import PREFACE, settings
from tests.support.asking import asking, failures, wait_for_more
from tests.support.certificates import Certificates
from tests.support.clients import Grpc, HttpConnection, RawConnection, get, metric
from tests.support.engines import engine_of, kill_engine
from tests.support.http2 import RawHttp2
from tests.support.server import FAKE, START_LIMIT_S, Server, refused_start
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator


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
        pytest.param("http", b"", marks=pytest.mark.long),
        ("http", ASKED),
        pytest.param("grpc", b"", marks=pytest.mark.long),
        pytest.param("grpc", PREFACE + settings(), marks=pytest.mark.long),
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
    assert "all places are taken" in server.log
    assert "exception that nobody caught" not in server.log


def test_the_soft_limit_of_files_is_raised(models: Path) -> None:
    """To the hard one, from which the number of connections follows."""
    with Server(models, *FAKE, files=(400, 3000)) as server:
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        assert (soft, hard) == (3000, 3000)
        limit = metric(server, "bertserve_connections_limit", ports="clients")
    assert 2000 < limit < 3000


@pytest.mark.parametrize(
    ("files", "options"), [(400, ["--max-connections", "5000"]), pytest.param(64, [], marks=pytest.mark.long)]
)
def test_a_bound_that_the_limit_of_files_does_not_allow_is_refused(
    models: Path, files: int, options: list[str]
) -> None:
    """One line says how many files are needed and how many there may be."""
    ended = refused_start("--models", str(models), *FAKE, *options, files=(files, files))
    assert ended.returncode == 1
    assert f"open files, and this process may have {files}: raise the hard limit" in ended.stderr


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
        wait_for(lambda: "refused a connection: all places are taken" in server.log, "its line in the log")
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


def test_one_address_may_have_so_many(models: Path) -> None:
    """The next one is refused, also where others are idle: they are the same client's."""
    with Server(models, *FAKE, "--max-connections-per-peer", "2") as server:
        with RawConnection(server.http), RawConnection(server.http):
            wait_for(lambda: metric(server, "bertserve_connections", protocol="http") == 2, "two connections")
            assert get(server.http, "/livez").status == 503
            assert metric(server, "bertserve_connections_refused_total", ports="clients", reason="peer") == 1
        wait_for(lambda: metric(server, "bertserve_connections", protocol="http") == 0, "their end")
        assert get(server.http, "/livez").status == 200


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def test_a_handshake_that_does_not_go_on_gives_way(models: Path, certificates: Certificates) -> None:
    """It holds a descriptor, though it is no connection yet."""
    options = ("--max-connections", "2", "--header-timeout-s", "60")
    with Server(models, *FAKE, *options, tls=certificates) as server, contextlib.ExitStack() as held:
        flood(server.http, 2, b"", held)
        wait_live(server.http)
        assert metric(server, "bertserve_connections_displaced_total", ports="clients") >= 1


def test_probes_have_places_of_their_own(models: Path) -> None:
    """Whoever holds connections there idly gives way to a probe too."""
    with Server(models, *FAKE) as server, contextlib.ExitStack() as held:
        flood(server.metrics, 150, ASKED, held)
        wait_live(server.metrics)
        assert metric(server, "bertserve_connections_displaced_total", ports="probes") > 0


@pytest.mark.long
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
