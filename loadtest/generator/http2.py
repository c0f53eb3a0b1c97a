"""Minimal client for unary gRPC calls over HTTP/2 (RFC 9113).

A call costs this process 130 us of CPU time. Libraries would add to that: `hyperframe` 25 us (1.19 times), `hpack` for
each reply's trailers another 25 us (1.19 times), `h2` 200 us (2.6 times). gRPC's own client takes about 300 us per
call. Therefore the header block of a method is built once, a call is two frames around prebuilt bytes, and this module
decodes the trailers of our server. The server is told to keep no dynamic table, so a header block's bytes always mean
the same.
"""

from __future__ import annotations

import struct
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import unquote

from hpack import Decoder, HPACKError

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator import frames
from bertserve.loadtest.generator.frames import DATA, END_HEADERS, END_STREAM, HEADERS, LARGEST, frame
from bertserve.loadtest.generator.wire import Reply, Served

if TYPE_CHECKING:
    from collections.abc import Sequence

_MANY_STREAMS = 1 << 20
_NEVER_INDEXED = 0x10
_LONG = 127
"""From this value on, a length takes several bytes or the string is Huffman-coded (RFC 7541, 5.1 and 5.2)."""

_CODES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)

Field = tuple[bytes, bytes]
Pair = tuple[str, str]


def fields_of(block: bytes) -> Sequence[Field]:
    """Decodes a header block of a peer that keeps no dynamic table.

    Short literals with literal names, as our server writes them, are decoded here. Any other block goes to `hpack`.

    Raises:
        BenchError: The block cannot be decoded, or refers to a dynamic table.
    """
    found, at, end = [], 0, len(block)
    try:
        while at < end:
            name = at + 2
            stop = name + block[at + 1]
            value = stop + 1
            if block[at] & ~_NEVER_INDEXED or block[at + 1] >= _LONG or block[stop] >= _LONG:
                return _decoded(block)
            at = value + block[stop]
            found.append((block[name:stop], block[value:at]))
    except IndexError:
        return _decoded(block)
    return found if at == end else _decoded(block)


@lru_cache(1 << 10)
def _decoded(block: bytes) -> Sequence[Field]:
    try:
        return [(bytes(name), bytes(value)) for name, value in Decoder().decode(block, raw=True)]
    except (HPACKError, ValueError) as error:
        raise BenchError(f"cannot decode a gRPC header block ({error}): {block.hex()}") from error


class _Stream:
    """A call in flight."""

    __slots__ = ("block", "body", "ended", "tag", "window")

    def __init__(self, tag: object, window: int) -> None:
        self.tag = tag
        self.window = window
        self.block = b""
        self.body = b""
        self.ended = 0


class GrpcWire:
    """One connection that carries concurrent calls of one method."""

    is_open = True

    def __init__(self, authority: str, path: str, metadata: Sequence[Pair] = (), scheme: str = "http") -> None:
        """Prepares the header block of the method.

        Args:
            authority: `host:port` of the server.
            path: `/package.Service/Method`.
            metadata: Sent with every call.
            scheme: `https` over TLS.
        """
        pseudo = [(":method", "POST"), (":scheme", scheme), (":path", path), (":authority", authority)]
        self._head = frames.header_block([*pseudo, ("te", "trailers"), ("content-type", "application/grpc"), *metadata])
        self._streams: dict[int, _Stream] = {}
        self._next = 1
        self._most = _MANY_STREAMS
        self._window = self._stream_window = frames.WINDOW
        self._held: deque[tuple[int, bytes]] = deque()
        self._owed = b""
        self._rest = b""
        self._taken = 0
        self._leaving = False

    def opening(self) -> bytes:
        """The connection preface, with maximum flow-control windows and without a dynamic table."""
        values = {frames.HEADER_TABLE_SIZE: 0, frames.ENABLE_PUSH: 0, frames.INITIAL_WINDOW_SIZE: LARGEST}
        return frames.PREFACE + frames.settings(*values.items()) + frames.window_update(0, LARGEST - frames.WINDOW)

    def room(self) -> int:
        """Number of further streams that the server accepts."""
        return 0 if self._leaving else max(0, self._most - len(self._streams))

    def request(self, message: bytes, tag: object) -> bytes:
        """The frames of a call that fit the server's flow-control windows; `owed` returns the rest later.

        Args:
            message: With gRPC's prefix, see `prefixed`.
            tag: Returned with the reply.
        """
        number, size = self._next, len(message)
        self._next += 2
        self._streams[number] = stream = _Stream(tag, self._stream_window)
        head = frame(HEADERS, END_HEADERS, number, self._head)
        if self._held or size > min(self._window, stream.window, frames.FRAME_BYTES):
            self._held.append((number, message))
            return head + self._let_out()
        self._window -= size
        return head + frame(DATA, END_STREAM, number, message)

    def feed(self, data: bytes) -> Sequence[Reply]:
        """Takes received bytes and returns the complete replies.

        Raises:
            BenchError: The connection ended, or the server violated the protocol.
        """
        if not data:
            raise BenchError("the server closed the gRPC connection")
        replies: list[Reply] = []
        found, self._rest = frames.split(self._rest + data if self._rest else data)
        for kind, flags, number, payload in found:
            if kind <= HEADERS or kind == frames.CONTINUATION:
                self._take(kind, flags, number, payload, replies)
            else:
                self._control(kind, flags, number, payload, replies)
        return replies

    def owed(self) -> bytes:
        """Acknowledgements, and frames that flow control held back."""
        owed, self._owed = self._owed, b""
        return owed

    def served(self, head: bytes) -> Served:
        """Parses the `bertserve-*` trailers."""
        said = {name: value for name, value in fields_of(head) if name.startswith(b"bertserve-")}
        names = (b"tokenize", b"queue", b"compute", b"total")
        return Served(
            int(said.get(b"bertserve-tokens", -1)),
            *(float(said.get(b"bertserve-%b-us" % name, -1.0)) for name in names),
        )

    def _take(self, kind: int, flags: int, number: int, payload: bytes, replies: list[Reply]) -> None:
        """Handles a HEADERS, CONTINUATION or DATA frame."""
        if kind == DATA:
            self._count(len(payload))
        if flags & frames.PADDED and kind != frames.CONTINUATION:
            payload = payload[1 : len(payload) - payload[0]]
        if flags & frames.PRIORITISED and kind == HEADERS:
            payload = payload[5:]
        stream = self._streams.get(number)
        if stream is None:
            return
        if kind == DATA:
            stream.body = stream.body + payload if stream.body else payload
            whole = bool(flags & END_STREAM)
        else:
            # The last block is the trailers; only they carry the call's status.
            stream.block = payload if kind == HEADERS else stream.block + payload
            stream.ended |= flags & END_STREAM if kind == HEADERS else 0
            whole = bool(stream.ended and flags & END_HEADERS)
        if whole:
            del self._streams[number]
            replies.append(self._reply(stream))

    def _reply(self, stream: _Stream) -> Reply:
        fields, body = dict(fields_of(stream.block)), stream.body
        status = fields.get(b"grpc-status")
        if status is None:
            found = fields.get(b":status", b"no status").decode("latin-1")
            return Reply(stream.tag, f"not a gRPC reply ({found})", stream.block, body)
        if status != b"0":
            words = unquote(fields.get(b"grpc-message", b"").decode("latin-1")).encode()
            return Reply(stream.tag, _code(status), stream.block, words)
        if len(body) < 5 or body[0] or int.from_bytes(body[1:5], "big") != len(body) - 5:  # noqa: PLR2004
            return Reply(stream.tag, "not one uncompressed message", stream.block, body)
        return Reply(stream.tag, "", stream.block, body[5:])

    def _count(self, size: int) -> None:
        """Replenishes the connection's flow-control window before it is empty."""
        self._taken += size
        if self._taken > LARGEST // 2:
            self._owed += frames.window_update(0, self._taken)
            self._taken = 0

    def _control(self, kind: int, flags: int, number: int, payload: bytes, replies: list[Reply]) -> None:
        """Handles a control frame; unknown types are ignored."""
        if kind == frames.PING and not flags & frames.ACK:
            self._owed += frame(frames.PING, frames.ACK, 0, payload)
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._obey(dict(struct.iter_unpack(">HI", payload)))
        elif kind == frames.WINDOW_UPDATE:
            self._widen(number, int.from_bytes(payload, "big"))
        elif kind == frames.RST_STREAM and number in self._streams:
            stream = self._streams.pop(number)
            replies.append(Reply(stream.tag, f"reset with code {int.from_bytes(payload, 'big')}", b"", b""))
        elif kind == frames.GOAWAY:
            self._leave(payload, replies)

    def _obey(self, values: dict[int, int]) -> None:
        """Applies the server's settings that concern a client without header indexing."""
        self._most = values.get(frames.MAX_CONCURRENT_STREAMS, self._most)
        window = values.get(frames.INITIAL_WINDOW_SIZE, self._stream_window)
        for stream in self._streams.values():
            stream.window += window - self._stream_window
        self._stream_window = window
        self._owed += frame(frames.SETTINGS, frames.ACK, 0) + self._let_out()

    def _widen(self, number: int, size: int) -> None:
        if not number:
            self._window += size
        elif number in self._streams:
            self._streams[number].window += size
        if self._held:
            self._owed += self._let_out()

    def _let_out(self) -> bytes:
        """Sends held frames in order, as far as the windows allow."""
        out = b""
        while self._held:
            number, message = self._held[0]
            stream = self._streams.get(number)
            if stream is None:  # answered or reset before its message was sent
                self._held.popleft()
                continue
            size = min(len(message), self._window, stream.window, frames.FRAME_BYTES)
            if size <= 0:
                break
            last = size == len(message)
            out += frame(DATA, END_STREAM if last else 0, number, message[:size])
            self._window -= size
            stream.window -= size
            if last:
                self._held.popleft()
            else:
                self._held[0] = (number, message[size:])
        return out

    def _leave(self, payload: bytes, replies: list[Reply]) -> None:
        """Handles GOAWAY: sends no new calls, and fails those that the server never saw."""
        last, code = struct.unpack_from(">II", payload)
        if code:
            words = payload[8:].decode("utf-8", "replace")
            raise BenchError(f"the server ended the gRPC connection: code {code} {words}".rstrip())
        self._leaving = True
        unseen = [number for number in self._streams if number > last & LARGEST]
        replies += [
            Reply(self._streams.pop(number).tag, "rejected: the server is shutting down", b"", b"") for number in unseen
        ]


def _code(value: bytes) -> str:
    """The name of a failure status."""
    number = int(value) if value.isdigit() else len(_CODES)
    return _CODES[number] if number < len(_CODES) else f"grpc-status {value.decode('latin-1')}"
