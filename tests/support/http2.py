"""A client of HTTP/2 that says whatever it is told, right or wrong."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

from hpack import Decoder, Encoder

from tests.support.clients import MODEL_INFER, RawConnection

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
ACK = END_STREAM = 1
END_HEADERS = 4
PADDED = 8
PRIORITISED = 32
INITIAL_WINDOW_SIZE = 4

NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 8, 9, 11


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes

    def number(self) -> int:
        """The last 32 bits of the payload: of GOAWAY (without words), RST_STREAM or WINDOW_UPDATE."""
        return int.from_bytes(self.payload[4:8] if self.kind == GOAWAY else self.payload[:4], "big")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def setting(key: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HI", key, value))


def prefixed(message: bytes, *, compressed: bool = False) -> bytes:
    return struct.pack(">BI", compressed, len(message)) + message


def request_fields(path: str = MODEL_INFER, **changes: str | None) -> list[tuple[str, str]]:
    """The fields of a request; `method=None` leaves `:method` out, `te="x"` adds a field."""
    fields: dict[str, str | None] = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "test"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    for name, value in changes.items():
        pseudo = f":{name}"
        fields[pseudo if pseudo in fields else name.replace("_", "-")] = value
    return [(name, value) for name, value in fields.items() if value is not None]


@dataclass
class Reply:
    fields: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> int:
        """The status of gRPC; -1 if there is none."""
        return int(self.fields.get("grpc-status", -1))

    @property
    def message(self) -> bytes:
        assert self.data[:5] == struct.pack(">BI", 0, len(self.data) - 5)
        return self.data[5:]


class Replies:
    """Frames sorted by stream."""

    def __init__(self) -> None:
        self._decoder = Decoder()
        self.streams: dict[int, Reply] = {}

    def take(self, arrived: Frame) -> Reply:
        """Adds a frame; returns its stream's reply."""
        reply = self.streams.setdefault(arrived.stream, Reply())
        if arrived.kind == HEADERS:
            reply.fields |= {str(name): str(value) for name, value in self._decoder.decode(arrived.payload)}
        elif arrived.kind == DATA:
            reply.data += arrived.payload
        elif arrived.kind == RST_STREAM:
            reply.reset = arrived.number()
        reply.ended |= arrived.kind in {HEADERS, DATA} and bool(arrived.flags & END_STREAM)
        return reply


def split(data: bytes) -> tuple[list[Frame], bytes]:
    """The whole frames in some bytes, and the rest."""
    found, at = [], 0
    while len(data) - at >= 9:
        size = int.from_bytes(data[at : at + 3], "big")
        if len(data) - at < 9 + size:
            break
        kind, flags, stream = struct.unpack_from(">BBI", data, at + 3)
        found.append(Frame(kind, flags, stream, data[at + 9 : at + 9 + size]))
        at += 9 + size
    return found, data[at:]


class RawHttp2(RawConnection):
    """A connection that has begun; use it in a `with` block."""

    def __init__(
        self,
        address: str,
        *,
        first: bytes | None = None,
        window: int = 1 << 30,
        opened: socket.socket | None = None,
    ) -> None:
        """`first` follows the preface; `window` is what all replies together may bring beyond the first 64 KiB."""
        super().__init__(address, protocol="h2", opened=opened)
        self._encoder = Encoder()
        self._rest = b""
        self._arrived: deque[Frame] = deque()
        self.replies = Replies()
        self.send(PREFACE + (frame(SETTINGS, 0, 0) if first is None else first))
        if window:
            self.send(frame(WINDOW_UPDATE, 0, 0, window.to_bytes(4, "big")))

    def __enter__(self) -> Self:
        return self

    def block(self, fields: list[tuple[str, str]] | None = None) -> bytes:
        """A header block; by default that of ModelInfer."""
        return self._encoder.encode(request_fields() if fields is None else fields)

    def call(self, stream: int, message: bytes, path: str = MODEL_INFER, **changes: str | None) -> None:
        """Sends a whole call whose message fits into one frame."""
        self.send(
            frame(HEADERS, END_HEADERS, stream, self.block(request_fields(path, **changes)))
            + frame(DATA, END_STREAM, stream, prefixed(message))
        )

    def frames(self) -> Iterator[Frame]:
        """Frames until the server closes.

        Raises:
            TimeoutError: It sends nothing and does not close.
        """
        while True:
            while self._arrived:
                yield self._arrived.popleft()
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return
            if not data:
                return
            found, self._rest = split(self._rest + data)
            self._arrived.extend(found)

    def reply(self, stream: int) -> Reply:
        """The reply on a stream, once it has ended or been reset."""
        reply = self.replies.streams.get(stream)
        if reply is not None and (reply.ended or reply.reset is not None):
            return reply
        for arrived in self.frames():
            reply = self.replies.take(arrived)
            if arrived.stream == stream and (reply.ended or reply.reset is not None):
                return reply
        raise AssertionError("the connection ended before the reply")

    def await_frame(self, kind: int) -> Frame:
        """The next frame of a kind; those before it count as read."""
        for arrived in self.frames():
            self.replies.take(arrived)
            if arrived.kind == kind and not (kind == SETTINGS and arrived.flags & ACK):
                return arrived
        raise AssertionError(f"the connection ended without a frame of type {kind}")

    def goaway(self) -> int:
        """The code of the GOAWAY with which the server closes."""
        code = None
        for arrived in self.frames():
            self.replies.take(arrived)
            if arrived.kind == GOAWAY:
                code = arrived.number()
        assert code is not None, "closed without GOAWAY"
        return code
