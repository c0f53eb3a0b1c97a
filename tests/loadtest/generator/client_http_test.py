from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.client import Clients
from bertserve.loadtest.generator.forms import FORMS
from bertserve.loadtest.generator.http1 import HttpWire, post_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HIDDEN = 4
TOKENS = 8
BODY = b"[[0.5,0.5,0.5,0.5]]"
CHECK = FORMS["ours"].check(HIDDEN, TOKENS)


def reply(status: str = "200 OK", body: bytes = BODY, tokens: int = TOKENS) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}X-Compute-Tokens: {tokens}\r\n\r\n".encode() + body


def converse(connection: socket.socket, pieces: Sequence[bytes]) -> None:
    """Answers every request on a connection with the same pieces, then waits for the next."""
    data = b""
    with connection, contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            while (end := data.find(b"\r\n\r\n")) < 0:
                if not (received := connection.recv(65536)):
                    return
                data += received
            found = re.search(rb"Content-Length: (\d+)", data)
            size = end + 4 + int(found[1] if found else 0)
            while len(data) < size:
                data += connection.recv(65536)
            data = data[size:]
            for piece in pieces:
                if not piece:
                    return
                connection.sendall(piece)
                time.sleep(0.001)  # the client must see the pieces one by one


@pytest.fixture
def serve() -> Iterator[Callable[[Sequence[bytes]], int]]:
    """Starts servers that answer with given pieces; an empty piece ends the connection."""
    with contextlib.ExitStack() as stack:

        def start(pieces: Sequence[bytes]) -> int:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def accept() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = listener.accept()
                        threading.Thread(target=converse, args=(connection, pieces), daemon=True).start()

            threading.Thread(target=accept, daemon=True).start()
            # Closing alone does not wake a thread that waits in `accept`.
            stack.callback(lambda: listener.shutdown(socket.SHUT_RDWR))
            return int(listener.getsockname()[1])

        yield start


def opened(port: int) -> Clients:
    """A client with three requests for that port."""
    clients = Clients()
    clients.open("way", "ours", port, "/embed", HIDDEN, {str(TOKENS): ["one", "two", "three"]})
    return clients


def read(data: bytes) -> None:
    wire = HttpWire()
    wire.request(b"", None)
    for found in wire.feed(data):
        CHECK(found)


def test_a_request_is_a_whole_post() -> None:
    """The bytes are one HTTP/1.1 request whose body is the text as JSON, whatever is in the text."""
    message = post_bytes("127.0.0.1:80", "/embed", {"inputs": 'a "ü"\n'})
    head, _, body = message.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /embed HTTP/1.1\r\nHost: 127.0.0.1:80\r\n")
    assert b"Content-Length: %d" % len(body) in head
    assert json.loads(body) == {"inputs": 'a "ü"\n'}


def test_a_reply_may_come_in_any_pieces() -> None:
    """A reply cut at any two places, or byte by byte, is read like a whole one."""
    whole = reply()
    wire = HttpWire()
    for first in range(1, len(whole) - 1):
        wire.request(b"", first)
        assert not wire.feed(whole[:first])
        [found] = wire.feed(whole[first:])
        assert (found.tag, found.fault, found.body) == (first, "", BODY)
    wire.request(b"", "last")
    pieces = [wire.feed(whole[place : place + 1]) for place in range(len(whole))]
    assert [found.body for replies in pieces for found in replies] == [BODY]


@pytest.mark.parametrize(
    "wrong",
    [
        reply("429 Too Many Requests", b'{"error":"overloaded"}'),
        reply("503 Service Unavailable"),
        reply(body=b"[[]]"),
        reply(body=b'{"embedding": [0.5, 0.5]}'),
        reply(tokens=TOKENS + 1),
        reply() + b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_a_wrong_reply_stops_the_measurement(wrong: bytes) -> None:
    """Another status, size, shape or token count than expected is an error, not a sample."""
    with pytest.raises(BenchError, match="reply"):
        read(wrong)


@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("pieces", [[reply()], [reply()[:20], reply()[20:90], reply()[90:]]])
def test_replies_are_counted(
    serve: Callable[[Sequence[bytes]], int], connections: int, pieces: Sequence[bytes]
) -> None:
    """One connection or several, replies whole or in pieces: each is counted once and takes its time."""
    client = opened(serve(pieces))
    started = time.monotonic()
    sample = client.measure("way", connections, TOKENS, 0.02, 0.2)
    took_ms = (time.monotonic() - started) * 1000
    assert 0 < sample["requests"] < sample["exchanges"]
    assert sample["per_s"] == pytest.approx(sample["requests"] / 0.2)
    assert 0 < sample["p50_ms"] <= sample["p99_ms"] < took_ms
    assert sample["client_cpu_us"] > 0


def test_the_vector_of_a_reply_is_read(serve: Callable[[Sequence[bytes]], int]) -> None:
    """The embedding itself can be had, so that it can be compared with the engine's."""
    assert opened(serve([reply()])).vectors("way", TOKENS, 1) == [[0.5] * HIDDEN]


@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        ([reply("500 Internal Server Error", b'{"error":"broken"}')], "500 internal server error|500 Internal"),
        ([reply()[:60], b""], "closed the connection before its reply"),
    ],
)
def test_a_failing_server_stops_the_measurement(
    serve: Callable[[Sequence[bytes]], int], connections: int, pieces: Sequence[bytes], sentence: str
) -> None:
    """An error or a connection that ends is reported with what the server said."""
    with pytest.raises(BenchError, match=sentence):
        opened(serve(pieces)).measure("way", connections, TOKENS, 0.0, 5.0)


def test_no_server_is_a_sentence() -> None:
    """A port without a server ends in a sentence that names it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(BenchError, match=f"cannot connect to 127.0.0.1:{port}"):
        opened(port).measure("way", 1, TOKENS, 0.0, 0.1)
