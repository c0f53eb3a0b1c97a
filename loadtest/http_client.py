"""A client of `/embed` that costs little: requests are bytes made beforehand, replies are barely parsed.

It shares the machine with the server that it measures, so every microsecond it spends is one that the
server lacks. `python -m loadtest.http_client` measures when asked (see child.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import selectors
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

from loadtest.child import answer
from loadtest.errors import BenchError
from loadtest.sample import Window, sample_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadtest.sample import Exchange

_STATUS = b"http/1.1 200 "
_LENGTH = b"\r\ncontent-length:"
_READ_BYTES = 1 << 16
_SILENCE_S = 10.0
"""After so long without a reply the server counts as hung."""

_SILENCE_TIMEVAL = struct.pack("ll", int(_SILENCE_S), 0)


def request_bytes(host: str, port: int, text: str) -> bytes:
    """A whole `POST /embed` of one text on a connection that stays open."""
    body = json.dumps({"inputs": text}).encode()
    head = (
        f"POST /embed HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclasses.dataclass(slots=True, frozen=True)
class Expected:
    """What every reply must look like.

    Attributes:
        header: A lower-case header line that must be there; empty for none.
        least_bytes: The body has at least so many.
    """

    header: bytes
    least_bytes: int

    @classmethod
    def embedding(cls, tokens: int, hidden_size: int) -> Expected:
        """The embedding of one text of so many tokens."""
        return cls(b"\r\nx-compute-tokens: %d\r\n" % tokens, 2 * hidden_size)


class ReplyReader:
    """Puts the pieces of one reply after the other together and checks the whole."""

    def __init__(self, expected: Expected) -> None:
        """Waits for the first reply."""
        self._expected = expected
        self._data = b""
        self._head = b""
        self._size = 0

    def feed(self, data: bytes) -> bytes | None:
        """Takes what the socket had and returns the body once it is whole.

        Raises:
            BenchError: The connection ended, or the reply is not the expected one.
        """
        if not data:
            raise BenchError("the server closed a connection in the middle of an exchange")
        self._data = self._data + data if self._data else data
        if not self._size:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return None
            self._head = self._data[: end + 4].lower()
            self._size = end + 4 + _content_length(self._head)
        if len(self._data) < self._size:
            return None
        body = self._data[len(self._head) : self._size]
        if len(self._data) > self._size or not self._is_right(body):
            shown = self._data[:400].decode("utf-8", "replace")
            raise BenchError(f"a wrong reply over HTTP ({len(body)} bytes, expected an embedding):\n{shown}")
        self._data, self._size = b"", 0
        return body

    def _is_right(self, body: bytes) -> bool:
        return (
            self._head.startswith(_STATUS)
            and self._expected.header in self._head
            and len(body) >= self._expected.least_bytes
            and body.startswith(b"[[")
            and body.endswith(b"]]")
        )


def _content_length(head: bytes) -> int:
    at = head.find(_LENGTH)
    if at < 0:
        raise BenchError(f"a reply without Content-Length:\n{head.decode('utf-8', 'replace')}")
    return int(head[at + len(_LENGTH) : head.index(b"\r\n", at + len(_LENGTH))])


class HttpClient:
    """Requests to one server, by length of their texts."""

    def __init__(self) -> None:
        """Starts with nothing; see `open`."""
        self._address = ("", 0)
        self._requests: dict[int, list[bytes]] = {}
        self._hidden_size = 0

    def open(self, host: str, port: int, hidden_size: int, texts: dict[str, list[str]]) -> None:
        """Makes the requests.

        Args:
            host: Of the server.
            port: Its HTTP port.
            hidden_size: Numbers in an embedding.
            texts: Texts by their number of tokens.
        """
        self._address = (host, port)
        self._hidden_size = hidden_size
        self._requests = {
            int(tokens): [request_bytes(host, port, text) for text in group] for tokens, group in texts.items()
        }

    def vector(self, tokens: int) -> list[float]:
        """The server's embedding of the first text of that length."""
        expected = Expected.embedding(tokens, self._hidden_size)
        with _connect(self._address) as connection:
            body = _exchange(connection, self._requests[tokens][0], ReplyReader(expected))
        [vector] = json.loads(body)
        return list(vector)

    def measure(self, connections: int, tokens: int, warm_up_s: float, seconds: float) -> dict[str, Any]:
        """Keeps one request under way on each connection; returns a `Sample`'s fields."""
        expected = Expected.embedding(tokens, self._hidden_size)
        requests = self._requests[tokens]
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(_connect(self._address)) for _ in range(connections)]
            cpu = time.process_time()
            window = Window.after(time.perf_counter(), warm_up_s, seconds)
            exchanges = (
                one_by_one(sockets[0], requests, expected, window.end)
                if connections == 1
                else side_by_side(sockets, requests, expected, window.end)
            )
            cpu_s = time.process_time() - cpu
        return dataclasses.asdict(sample_of(exchanges, window, cpu_s))


def _connect(address: tuple[str, int]) -> socket.socket:
    try:
        made = socket.create_connection(address, _SILENCE_S)
    except OSError as error:
        raise BenchError(f"cannot connect to {address[0]}:{address[1]}: {error}") from error
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _exchange(connection: socket.socket, request: bytes, reader: ReplyReader) -> bytes:
    body = None
    try:
        connection.sendall(request)
        while body is None:
            body = reader.feed(connection.recv(_READ_BYTES))
    except OSError as error:
        raise BenchError(f"an exchange over HTTP failed: {error}") from error
    return body


def one_by_one(connection: socket.socket, requests: Sequence[bytes], expected: Expected, end: float) -> list[Exchange]:
    """Sends a request when the last one's reply is whole, until `end` (seconds, `time.perf_counter`).

    The socket blocks as its system would have it: a time-out of Python's own would add a call of `poll` to
    each exchange.
    """
    clock = time.perf_counter
    reader = ReplyReader(expected)
    exchanges: list[Exchange] = []
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SILENCE_TIMEVAL)
    for request in itertools.cycle(requests):
        sent = clock()
        _exchange(connection, request, reader)
        done = clock()
        exchanges.append((sent, done))
        if done >= end:
            break
    return exchanges


class _Lane:
    """One connection and the request that is under way on it."""

    __slots__ = ("connection", "reader", "sent")

    def __init__(self, connection: socket.socket, expected: Expected) -> None:
        self.connection = connection
        self.reader = ReplyReader(expected)
        self.sent = 0.0

    def send(self, request: bytes) -> None:
        self.sent = time.perf_counter()
        # A connection carries one small request at a time, so its buffer is empty and takes it whole.
        if self.connection.send(request) != len(request):
            raise BenchError("a request did not fit into an empty socket")


def side_by_side(
    sockets: Sequence[socket.socket], requests: Sequence[bytes], expected: Expected, end: float
) -> list[Exchange]:
    """Keeps a request under way on every connection until `end`, then waits for those under way."""
    clock = time.perf_counter
    exchanges: list[Exchange] = []
    supply: Iterator[bytes] = itertools.cycle(requests)
    busy = len(sockets)
    with selectors.DefaultSelector() as selector:
        try:
            for connection in sockets:
                connection.setblocking(False)
                lane = _Lane(connection, expected)
                selector.register(connection, selectors.EVENT_READ, lane)
                lane.send(next(supply))
            while busy:
                ready = selector.select(_SILENCE_S)
                if not ready:
                    raise BenchError(f"no reply over HTTP within {_SILENCE_S:g} s")
                for key, _ in ready:
                    lane = key.data
                    if lane.reader.feed(lane.connection.recv(_READ_BYTES)) is None:
                        continue
                    done = clock()
                    exchanges.append((lane.sent, done))
                    if done < end:
                        lane.send(next(supply))
                    else:
                        busy -= 1
        except OSError as error:
            raise BenchError(f"an exchange over HTTP failed: {error}") from error
    return exchanges


if __name__ == "__main__":
    client = HttpClient()
    answer({"open": client.open, "vector": client.vector, "measure": client.measure})
