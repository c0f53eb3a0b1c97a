"""What a refused request leaves in memory: nothing, by reference counting alone.

The collector of a warm server is as good as off, so here it is off: an error whose traceback leads to a frame that
holds the error keeps the whole request for ever.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import sys
from typing import TYPE_CHECKING, NamedTuple

import pytest

from loadtest.benchmarks.hostile.measure import LEFT_MB
from loadtest.benchmarks.processes import resident_bytes
from loadtest.errors import BenchError
from loadtest.generator.closed_loop import Lane, connect
from loadtest.generator.frames import prefixed
from loadtest.generator.grpc_messages import METHOD, request_bytes
from loadtest.generator.http1 import post_bytes
from loadtest.generator.http2 import GrpcWire
from tests.support.clients import RawConnection, metric
from tests.support.server import FAKE, Server
from tests.support.short_form import in_short
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    from loadtest.generator.wire import Reply

BODY_LIMIT = 4 << 20
BODIES = 8
MOST_GROWTH = BODIES * BODY_LIMIT // 3
"""What is left of all bodies together may be no more than a third of them; allocators keep a little."""

_WITHOUT_COLLECTOR = "import gc, sys; gc.disable(); from bertserve import main; sys.exit(main())"
_NOT_FINITE = "hello"


@pytest.fixture(scope="module")
def uncollected_server(models: Path) -> Iterator[Server]:
    """A server in which only reference counting frees anything."""
    faults = ("--fake-faults", "7592:nan")  # the token of `_NOT_FINITE`
    with Server(models, *FAKE, *faults, program=(sys.executable, "-c", _WITHOUT_COLLECTOR)) as server:
        yield server


def filled(message: object, size: int = BODY_LIMIT) -> bytes:
    """A message as JSON, with so many bytes."""
    return json.dumps(message).encode().ljust(size)


def request(path: str, body: bytes, *, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nConnection: close\r\n{headers}"
    framing = "" if "Transfer-Encoding" in headers else f"Content-Length: {len(body)}\r\n"
    return f"{head}{framing}\r\n".encode() + body


class Refused(NamedTuple):
    status: int
    sent: bytes


_GZIP = "Content-Encoding: gzip\r\n"
_TEXTS = {"inputs": ["a text"]}
REFUSED: dict[str, Callable[[], Refused]] = {
    "no JSON": lambda: Refused(400, request("/embed", b"x" * BODY_LIMIT)),
    "not UTF-8": lambda: Refused(400, request("/embed", b'{"inputs": "' + b"\xff" * (BODY_LIMIT - 20) + b'"}')),
    "schema": lambda: Refused(422, request("/embed", filled({"inputs": {"a": 1}}))),
    "too many inputs": lambda: Refused(422, request("/embed", filled({"inputs": ["a text"] * 100_000}))),
    "too long a text": lambda: Refused(
        422, request("/embed", filled({"inputs": "a" * (BODY_LIMIT - 70), "truncate": False}))
    ),
    "empty": lambda: Refused(400, request("/embed", filled({"inputs": []}))),
    "media type": lambda: Refused(415, request("/embed", filled(_TEXTS)).replace(b"application/json", b"text/plain")),
    "encoding": lambda: Refused(415, request("/embed", filled(_TEXTS), headers="Content-Encoding: br\r\n")),
    "deadline": lambda: Refused(504, request("/embed", filled(_TEXTS), headers="X-Request-Timeout-Ms: 0.001\r\n")),
    "engine": lambda: Refused(500, request("/embed", filled({"inputs": [_NOT_FINITE]}))),
    "no such path": lambda: Refused(404, request("/no/such/path", filled(_TEXTS))),
    "method": lambda: Refused(405, request("/embed", filled(_TEXTS)).replace(b"POST", b"PUT")),
    "no such model": lambda: Refused(404, request("/models/no-such/embed", filled(_TEXTS))),
    "wrong task": lambda: Refused(424, request("/embed_all", filled(_TEXTS))),
    "openai": lambda: Refused(400, request("/v1/embeddings", filled({"input": 1, "model": "minilm"}))),
    "cohere": lambda: Refused(422, request("/v2/rerank", filled({"query": 1}))),
    "oip": lambda: Refused(400, request("/v2/models/minilm/infer", filled({"inputs": [{"name": "text"}]}))),
    "past the app's routes": lambda: Refused(422, request("/tokenize", filled({"inputs": 1}))),
    "compressed": lambda: Refused(422, request("/embed", gzip.compress(filled({"inputs": {"a": 1}})), headers=_GZIP)),
    "compressed, too large": lambda: Refused(
        413, request("/embed", gzip.compress(b" " * (BODY_LIMIT + 1)), headers=_GZIP)
    ),
    "compressed, cut off": lambda: Refused(400, request("/embed", gzip.compress(filled(_TEXTS))[:-9], headers=_GZIP)),
    "chunks beyond the limit": lambda: Refused(
        413,
        request(
            "/embed",
            b"".join([b"10000\r\n" + b"x" * 65_536 + b"\r\n"] * (BODY_LIMIT // 65_536 + 1)),
            headers="Transfer-Encoding: chunked\r\n",
        ),
    ),
}
"""How each is made: together they are 80 MB, and most processes run none of these tests."""

SHORT = ("no JSON", "schema", "engine", "no such path", "compressed", "compressed, cut off", "chunks beyond the limit")
"""One of each part of the way that refuses."""


@pytest.mark.parametrize("kind", in_short(REFUSED, *SHORT))
def test_refused_requests_leave_nothing(uncollected_server: Server, kind: str) -> None:
    """Whatever they are refused for, and wherever on their way."""
    status, sent = REFUSED[kind]()

    def refuse(count: int) -> int:
        for _ in range(count):
            with RawConnection(uncollected_server.http) as connection:
                connection.send(sent)
                assert connection.status() == status
        return resident_bytes(uncollected_server.pid)

    before = refuse(4)
    after = refuse(BODIES)
    assert after - before < MOST_GROWTH or refuse(BODIES) - after < MOST_GROWTH, "what leaks grows each time"


@pytest.mark.parametrize(
    "sent", [pytest.param(1 << 20, id="in its body", marks=pytest.mark.long), pytest.param(None, id="behind it")]
)
def test_clients_that_leave_leave_nothing(uncollected_server: Server, sent: int | None) -> None:
    """In the middle of a body, or before their answer.

    One at a time: what bodies held at once is not given back by the allocator, and is no leak.
    """

    def leave(count: int) -> int:
        for _ in range(count):
            with RawConnection(uncollected_server.http) as connection:
                connection.send(request("/embed", filled(_TEXTS))[:sent])
            wait_for(
                lambda: not metric(uncollected_server, "bertserve_connections", protocol="http"),
                "the end of the connection",
            )
        return resident_bytes(uncollected_server.pid)

    before = leave(4)
    after = leave(BODIES * 2)
    assert after - before < MOST_GROWTH or leave(BODIES * 2) - after < MOST_GROWTH, "what leaks grows each time"


_AT_ONCE = 32
LEFT_BYTES = 800
"""Of each small request, where they are few."""


def _refusals(server: Server, way: str) -> Generator[None, None, None]:
    """32 small requests for each step, one after another on a connection; the step ends when all of them are refused.

    At full speed calls that are only refused use up a connection's credit in the end: then there is another one.
    """
    if way == "http":
        with RawConnection(server.http) as http:
            requests = post_bytes("test", "/embed", b'{"inputs": 7}') * _AT_ONCE
            while True:
                http.send(requests)
                answered = b""
                while answered.count(b"HTTP/1.1 422") < _AT_ONCE or not answered.endswith(b"}"):
                    answered += http.socket.recv(1 << 16)
                yield

    def check(reply: Reply) -> None:
        assert reply.fault

    message = prefixed(request_bytes("no-such-model", "a text"))
    host, port = server.grpc.split(":")
    while True:
        with connect(host, int(port)) as connection, _ended_for_its_cost():
            lane = Lane(connection, GrpcWire(server.grpc, METHOD), check)
            while True:
                lane.send([message] * _AT_ONCE)
                missing = _AT_ONCE
                while missing:
                    missing -= len(lane.receive())
                yield


@contextlib.contextmanager
def _ended_for_its_cost() -> Iterator[None]:
    """Takes the end of a connection that cost too much, and no other."""
    try:
        yield
    except BenchError as error:
        if "too_many_pings" not in str(error):
            raise


@pytest.mark.parametrize("count", [5_000, pytest.param(500_000, marks=pytest.mark.endurance)])
@pytest.mark.parametrize("way", ["http", "grpc"])
def test_any_number_of_small_refusals_leaves_nothing(uncollected_server: Server, way: str, count: int) -> None:
    """A million of them, half over each wire: no list, table or label grows with them."""
    refusals = _refusals(uncollected_server, way)

    def refuse(requests: int) -> int:
        for _ in range(requests // _AT_ONCE):
            next(refusals)
        return resident_bytes(uncollected_server.pid)

    with contextlib.closing(refusals):
        before = refuse(2_000)
        after = refuse(count)
        assert after - before < min(LEFT_MB * (1 << 20), count * LEFT_BYTES)


def test_idle_connections_hold_no_body(uncollected_server: Server) -> None:
    """A request that was answered is forgotten, however long its connection is kept."""
    sent = request("/embed", filled(_TEXTS)).replace(b"Connection: close", b"Connection: keep-alive")
    kept = []
    before = resident_bytes(uncollected_server.pid)
    try:
        for _ in range(BODIES):
            kept.append(RawConnection(uncollected_server.http))
            kept[-1].send(sent)
            assert kept[-1].socket.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert resident_bytes(uncollected_server.pid) - before < MOST_GROWTH
    finally:
        for connection in kept:
            connection.socket.close()
