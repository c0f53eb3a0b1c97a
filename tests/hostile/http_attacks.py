"""Attacks on the HTTP port. Each function is one connection's life; when it returns, the next connection begins."""

from __future__ import annotations

import gzip
import itertools
import json
from functools import cache
from typing import TYPE_CHECKING

from bertserve.loadtest.generator.http1 import post_bytes
from tests.hostile.lines import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.hostile.lines import Line

    Attack = Callable[[Line], None]

BODY_LIMIT = 4 << 20
_LEAVING_BYTES = 1_900_000
_GZIP = "Content-Encoding: gzip\r\n"
_SLOW_SOCKETS = 24
_IDLE_SOCKETS = 150
_DRIP_S = 0.2


def _post(path: str, body: bytes, headers: str = "") -> bytes:
    return post_bytes(HOST, path, body, headers=headers)


def _padded(message: bytes, size: int) -> bytes:
    """JSON with blanks before its last character."""
    return message[:-1] + b" " * (size - len(message)) + message[-1:]


def _repeated(make: Callable[[], Sequence[bytes]], rest_s: float = 0.0, *, reads: bool = True) -> Attack:
    """Sends the same requests again and again, as long as the server keeps the connection."""
    made = cache(make)

    def attack(line: Line) -> None:
        line.reads = reads
        for request in itertools.cycle(made()):
            line.send(request)
            line.pace.rest(rest_s)

    return attack


@cache
def _refused_body() -> bytes:
    return _padded(b'{"inputs": 7}', BODY_LIMIT - 16)


def _large() -> list[bytes]:
    """Bodies that are refused only after half a million values are decoded."""
    many = b"[1]," * 480_000 + b"[1]"
    tensor = b'{"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [%b]}]}'
    return [
        _post("/embed", b'{"inputs": [%b]}' % many),
        _post("/v2/models/minilm/infer", tensor % (b"[]," * 640_000 + b"[]")),
        _post("/v1/embeddings", b'{"model": "minilm", "input": [%b]}' % many),
        _post("/v2/models/minilm/infer", tensor % (b'"a",' * 480_000 + b'"a"')),
    ]


def _tiny() -> list[bytes]:
    """A body in chunks of one byte."""
    head = b"POST /embed HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head + b"1\r\n \r\n" * 60_000 + b"0\r\n\r\n"]


def _many_lines() -> list[bytes]:
    """95 header lines of 130 bytes before a request that is refused."""
    lines = "".join(f"X-Header-{number}: {'v' * 120}\r\n" for number in range(95))
    return [_post("/embed", b'{"inputs": 7}', lines)]


refused_bodies = _repeated(lambda: [_post("/embed", _refused_body())])
# One at a time, at most 200 per second over all connections: the smallest have 4 KB.
gzip_bombs = _repeated(lambda: [_post("/embed", gzip.compress(_refused_body(), 9), _GZIP)], 0.04)
# Pipelined requests whose replies are 600 times their size.
unread_replies = _repeated(lambda: [_post("/embed", json.dumps({"inputs": ["a"] * 32}).encode()) * 64], reads=False)
large_bodies = _repeated(_large)
tiny_chunks = _repeated(_tiny)
many_headers = _repeated(_many_lines)
# The smallest requests that are refused, hundreds in one segment.
refused_ahead = _repeated(lambda: [b"GET /x HTTP/1.1\r\nHost: t\r\n\r\n" * 1000])


@cache
def _good_body() -> bytes:
    return _post("/embed", _padded(b'{"inputs": "leaving"}', _LEAVING_BYTES))


def leaving(line: Line) -> None:
    """Sends a good request of 1.9 MB and does not wait for the answer."""
    line.send(_good_body())
    line.pace.rest(0.0005)


def half_bodies(line: Line) -> None:
    line.send(_post("/embed", _refused_body())[:-64])
    line.hold()


def idle_connections(line: Line) -> None:
    """150 connections, each silent after one good request."""
    for other in line.open_others(_IDLE_SOCKETS):
        other.send(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
    line.hold()


def slow(opening: bytes, drop: bytes) -> Attack:
    """One byte on each of 24 connections, five times per second."""

    def attack(line: Line) -> None:
        others = line.open_others(_SLOW_SOCKETS)
        for other in others:
            other.send(opening)
        while True:
            line.pace.rest(_DRIP_S)
            for other in others:
                other.send(drop)

    return attack


slow_headers = slow(b"POST /embed HTTP/1.1\r\nHost: test\r\nX-Slow: ", b"x")
slow_bodies = slow(b"POST /embed HTTP/1.1\r\nHost: test\r\nContent-Length: 100000\r\n\r\n{", b" ")
