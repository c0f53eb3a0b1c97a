"""A no-op server: sends the same bytes for every request, over HTTP/1.1 and gRPC on one port.

A client measures its own overhead against it. `python -m bertserve.loadtest.generator.null_server` prints its port and
serves until its standard input ends.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import sys

from bertserve.loadtest.generator import frames
from bertserve.loadtest.generator.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    frame,
    header_block,
    prefixed,
)

_NUMBERS = 384
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_READ_BYTES = 1 << 16


def _http_reply() -> bytes:
    body = b"[[%b]]" % b",".join([b"0.0510310"] * _NUMBERS)
    timing = b"tokenize;dur=0.000, queue;dur=0.000, compute;dur=0.000, total;dur=0.000"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    return head + b"Server-Timing: %b\r\nX-Compute-Tokens: 8\r\n\r\n" % timing + body


_HTTP_REPLY = _http_reply()
_HEADER_BLOCK = header_block([(":status", "200"), ("content-type", "application/grpc")])
_TRAILERS = header_block(
    [("grpc-status", "0"), *((f"bertserve-{stage}-us", "0") for stage in ("tokenize", "queue", "compute", "total"))]
)
_VECTOR = b"\x32\x80\x0c"
"""Field 6 of a `ModelInferResponse`, `raw_output_contents`, with 1536 bytes."""

_MESSAGE = prefixed(_VECTOR + bytes(4 * _NUMBERS))


class _Peer:
    """A connection. Its first bytes identify the protocol."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._data = b""
        self._is_http2: bool | None = None

    def serve(self) -> bool:
        """Answers received data; False once the connection has ended."""
        data = self.connection.recv(_READ_BYTES)
        if not data:
            return False
        self._data += data
        if self._is_http2 is None:
            self._is_http2 = self._data.startswith(b"PRI ")
            if self._is_http2:
                self._data = self._data[len(PREFACE) :]
                self.connection.sendall(frames.settings() + frames.window_update(0, frames.LARGEST - frames.WINDOW))
        if replies := self._http2() if self._is_http2 else self._http1():
            self.connection.sendall(replies)
        return True

    def _http1(self) -> bytes:
        replies = b""
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._data, 0, end + 2)
            size = end + 4 + (int(length[1]) if length else 0)
            if len(self._data) < size:
                break
            self._data = self._data[size:]
            replies += _HTTP_REPLY
        return replies

    def _http2(self) -> bytes:
        replies = b""
        found, self._data = frames.split(self._data)
        for kind, flags, stream, payload in found:
            if kind == DATA and flags & END_STREAM:
                replies += (
                    frame(HEADERS, END_HEADERS, stream, _HEADER_BLOCK)
                    + frame(DATA, 0, stream, _MESSAGE)
                    + frame(HEADERS, END_HEADERS | END_STREAM, stream, _TRAILERS)
                )
            elif kind in {frames.SETTINGS, frames.PING} and not flags & frames.ACK:
                replies += frame(kind, frames.ACK, 0, payload if kind == frames.PING else b"")
        return replies


def serve(listener: socket.socket, end: int) -> None:
    """Serves until the file descriptor `end` is readable or closed."""
    peers: dict[int, _Peer] = {}
    with select.epoll() as poll, contextlib.ExitStack() as stack:
        poll.register(listener, select.EPOLLIN)
        poll.register(end, select.EPOLLIN)
        while True:
            for ready, _ in poll.poll():
                if ready == end:
                    return
                if ready == listener.fileno():
                    connection = stack.enter_context(listener.accept()[0])
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    peers[connection.fileno()] = _Peer(connection)
                    poll.register(connection, select.EPOLLIN)
                elif not _serves(peers[ready]):
                    poll.unregister(ready)
                    peers.pop(ready).connection.close()


def _serves(peer: _Peer) -> bool:
    try:
        return peer.serve()
    except OSError:
        return False


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as opened:
        print(opened.getsockname()[1], flush=True)
        serve(opened, sys.stdin.fileno())
