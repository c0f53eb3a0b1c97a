"""Minimal HTTP/1.1 client for load tests: prebuilt requests, barely parsed replies.

The client shares the machine with the measured server, so every microsecond that it spends is lost to the server.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.wire import Reply, Served

if TYPE_CHECKING:
    from collections.abc import Sequence

_OK = b"HTTP/1.1 200 "
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ?([^\r\n]*)")
_LENGTH, _TOKENS, _TIMING = b"\r\ncontent-length:", b"\r\nx-compute-tokens:", b"\r\nserver-timing:"
_STAGE = re.compile(rb"(\w+);dur=([0-9.]+)")
_CLOSES = b"\r\nconnection: close"


def post_bytes(authority: str, path: str, body: object, headers: str = "") -> bytes:
    """A complete POST request on a keep-alive connection.

    Args:
        authority: `host:port` of the server.
        path: The request's path.
        body: Bytes, or a JSON value.
        headers: Additional header lines, each with its line end.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {authority}\r\n{headers}"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def get_bytes(authority: str, path: str, headers: str = "") -> bytes:
    """A complete GET request on a keep-alive connection; see `post_bytes`."""
    return f"GET {path} HTTP/1.1\r\nHost: {authority}\r\n{headers}\r\n".encode()


class HttpWire:
    """One connection that carries one request at a time."""

    is_open = True

    def __init__(self) -> None:
        self._data = b""
        self._head = b""
        self._size = 0
        self._tag: object = None
        self._free = 1

    def opening(self) -> bytes:
        """Empty: HTTP/1.1 starts with a request."""
        return b""

    def room(self) -> int:
        """1 if the connection is open and idle, else 0."""
        return self._free

    def request(self, message: bytes, tag: object) -> bytes:
        """Returns the prebuilt request unchanged."""
        self._tag = tag
        self._free = 0
        return message

    def feed(self, data: bytes) -> Sequence[Reply]:
        """Takes received bytes and returns the reply once it is complete.

        Raises:
            BenchError: The connection ended, or the reply has no known length.
        """
        if not data:
            raise BenchError("the server closed the connection before its reply was complete")
        if self._data:
            data = self._data + data
        if not self._size:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:  # noqa: PLR2004  the blank line has not arrived yet
                self._data = data
                return ()
            # The head is lowercased once, then searched as bytes: case-insensitive patterns would cost more than the
            # rest of a reply.
            self._head = data[:end].lower()
            self._size = end + _content_length(self._head)
        if len(data) < self._size:
            self._data = data
            return ()
        if len(data) > self._size or self._free:
            raise BenchError(f"more than one reply to a request:\n{_shown(data)}")
        head = self._head
        self._data, self._size = b"", 0
        # The server is about to close this connection, so it takes no further request.
        self._free = 0 if _CLOSES in head else 1
        fault = "" if data.startswith(_OK) else _fault(data)
        return (Reply(self._tag, fault, head, data[len(head) :]),)

    def owed(self) -> bytes:
        return b""

    def served(self, head: bytes) -> Served:
        """Parses `Server-Timing` and `X-Compute-Tokens`."""
        timing = _value(head, _TIMING)
        stages = dict(_STAGE.findall(timing)) if timing else {}
        return Served(
            int(_value(head, _TOKENS) or -1),
            *(1e3 * float(stages.get(name, b"-0.001")) for name in (b"tokenize", b"queue", b"compute", b"total")),
        )


def _value(head: bytes, line: bytes) -> bytes:
    """The value of a header line; empty if absent."""
    at = head.find(line)
    return head[at + len(line) : head.index(b"\r\n", at + len(line))] if at >= 0 else b""


def _content_length(head: bytes) -> int:
    found = _value(head, _LENGTH)
    if not found:
        raise BenchError(f"a reply without Content-Length:\n{_shown(head)}")
    return int(found)


def _fault(head: bytes) -> str:
    status = _STATUS.match(head)
    if not status:
        raise BenchError(f"this is not HTTP/1.1:\n{_shown(head)}")
    return f"{status[1].decode()} {status[2].decode('latin-1')}".strip()


def _shown(data: bytes) -> str:
    return data[:400].decode("utf-8", "replace")
