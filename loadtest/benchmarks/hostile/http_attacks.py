"""Attacks on the HTTP port. Each function is one connection's life; when it returns, the next connection begins."""

from __future__ import annotations

import gzip
import itertools
import json
from functools import cache
from typing import TYPE_CHECKING

from loadtest.benchmarks.hostile.lines import HOST
from loadtest.generator.http1 import post_bytes

if TYPE_CHECKING:
    from loadtest.benchmarks.hostile.lines import Line

BODY_LIMIT = 4 << 20
_LEAVING_BYTES = 1_900_000
_GZIP = "Content-Encoding: gzip\r\n"
_SLOW_SOCKETS = 24
_IDLE_SOCKETS = 150
_DRIP_S = 0.2


@cache
def _post(path: str, body: bytes, headers: str = "") -> bytes:
    return post_bytes(HOST, path, body, headers=headers)


def _padded(message: bytes, size: int) -> bytes:
    """JSON with blanks before its last character."""
    return message[:-1] + b" " * (size - len(message)) + message[-1:]


def _again(line: Line, request: bytes) -> None:
    """Sends one request again and again, as long as the server lets the connection live."""
    while True:
        line.send(request)


@cache
def _refused_body() -> bytes:
    return _padded(b'{"inputs": 7}', BODY_LIMIT - 16)


def refused_bodies(line: Line) -> None:
    _again(line, _post("/embed", _refused_body()))


@cache
def _bomb() -> bytes:
    return gzip.compress(_refused_body(), 9)


def gzip_bombs(line: Line) -> None:
    """One at a time, at most 200 a second of all connections: the smallest are 4 KB."""
    while True:
        line.send(_post("/embed", _bomb(), _GZIP))
        line.pace.rest(0.04)


def leaving(line: Line) -> None:
    """Sends a good request of 1.9 MB and does not wait for the answer."""
    line.send(_post("/embed", _padded(b'{"inputs": "leaving"}', _LEAVING_BYTES)))
    line.pace.rest(0.0005)


def half_bodies(line: Line) -> None:
    request = _post("/embed", _refused_body())
    line.send(request[: len(request) - 64])
    line.hold()


@cache
def _many_texts() -> bytes:
    return _post("/embed", json.dumps({"inputs": ["a"] * 32}).encode())


def unread_replies(line: Line) -> None:
    """Sends ahead what is answered 600 times its size, and never reads."""
    line.reads = False
    _again(line, _many_texts() * 64)


@cache
def _large_bodies() -> list[bytes]:
    many = b"[1]," * 480_000 + b"[1]"
    tensor = b'{"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [%b]}]}'
    return [
        _post("/embed", b'{"inputs": [%b]}' % many),
        _post("/v2/models/minilm/infer", tensor % (b"[]," * 640_000 + b"[]")),
        _post("/v1/embeddings", b'{"model": "minilm", "input": [%b]}' % many),
        _post("/v2/models/minilm/infer", tensor % (b'"a",' * 480_000 + b'"a"')),
    ]


def large_bodies(line: Line) -> None:
    """Bodies that are refused only when half a million values are decoded."""
    for request in itertools.cycle(_large_bodies()):
        line.send(request)


def idle_connections(line: Line) -> None:
    """150 connections, each with one good request, which then say nothing."""
    for other in line.open_others(_IDLE_SOCKETS):
        other.send(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
    line.hold()


def _drip(line: Line, opening: bytes, drops: bytes) -> None:
    others = line.open_others(_SLOW_SOCKETS)
    for other in others:
        other.send(opening)
    for drop in itertools.cycle(drops):
        line.pace.rest(_DRIP_S)
        for other in others:
            other.send(bytes([drop]))


def slow_headers(line: Line) -> None:
    """A byte on each of 24 connections, five times a second."""
    _drip(line, b"POST /embed HTTP/1.1\r\nHost: test\r\nX-Slow: ", b"x")


def slow_bodies(line: Line) -> None:
    _drip(line, b"POST /embed HTTP/1.1\r\nHost: test\r\nContent-Length: 100000\r\n\r\n{", b" ")


@cache
def _tiny_chunks() -> bytes:
    head = b"POST /embed HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"1\r\n \r\n" * 60_000 + b"0\r\n\r\n"


def tiny_chunks(line: Line) -> None:
    """Bodies in chunks of one byte."""
    _again(line, _tiny_chunks())


@cache
def _many_headers() -> bytes:
    lines = "".join(f"X-Header-{number}: {'v' * 120}\r\n" for number in range(95))
    return _post("/embed", b'{"inputs": 7}', lines)


def many_headers(line: Line) -> None:
    """95 header lines of 130 bytes before a request that is refused."""
    _again(line, _many_headers())


def refused_ahead(line: Line) -> None:
    """The smallest requests that are refused, hundreds in one segment."""
    _again(line, b"GET /x HTTP/1.1\r\nHost: t\r\n\r\n" * 1000)
