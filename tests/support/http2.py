"""A client of HTTP/2 that says whatever it is told, right or wrong; `h2` and `hyperframe` read what it hears."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self, TypeVar

from h2 import events
from h2.errors import ErrorCodes
from h2.frame_buffer import FrameBuffer
from hpack import Decoder, Encoder
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame, SettingsFrame

from bertserve.loadtest.generator import frames as wire
from bertserve.loadtest.generator.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    frame,
    prefixed,
    reset,
    settings,
)
from tests.support.clients import MODEL_INFER, RawConnection

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Iterator, Sequence

    from h2.connection import H2Connection

START = PREFACE + settings()
REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":authority", "test")]

F = TypeVar("F", bound=Frame)

BREACHES = [
    (frame(DATA, 0, 1, b"early"), ErrorCodes.PROTOCOL_ERROR),
    (frame(DATA, 0, 0, b"none"), ErrorCodes.PROTOCOL_ERROR),
    (frame(DATA, 0, 1, b"x" * 16_385), ErrorCodes.FRAME_SIZE_ERROR),
    (reset(1), ErrorCodes.PROTOCOL_ERROR),
    (frame(wire.RST_STREAM, 0, 1, b"\0"), ErrorCodes.FRAME_SIZE_ERROR),
    (wire.window_update(1, 8), ErrorCodes.PROTOCOL_ERROR),
    (wire.window_update(0, 0), ErrorCodes.PROTOCOL_ERROR),
    (wire.window_update(0, 2**31 - 1), ErrorCodes.FLOW_CONTROL_ERROR),
    (frame(wire.PING, 0, 0, b"short"), ErrorCodes.FRAME_SIZE_ERROR),
    (frame(wire.PING, 0, 1, b"12345678"), ErrorCodes.PROTOCOL_ERROR),
    (frame(wire.SETTINGS, 0, 1), ErrorCodes.PROTOCOL_ERROR),
    (frame(wire.SETTINGS, 0, 0, b"12345"), ErrorCodes.FRAME_SIZE_ERROR),
    (frame(wire.SETTINGS, wire.ACK, 0, b"123456"), ErrorCodes.FRAME_SIZE_ERROR),
    (settings((wire.INITIAL_WINDOW_SIZE, 2**31)), ErrorCodes.FLOW_CONTROL_ERROR),
    (settings((2, 2)), ErrorCodes.PROTOCOL_ERROR),
    (settings((5, 100)), ErrorCodes.PROTOCOL_ERROR),
    (frame(wire.SETTINGS, 0, 0, b"\0\2\0\0\0\2\0\2\0\0\0\0"), ErrorCodes.PROTOCOL_ERROR),
    (frame(wire.SETTINGS, 0, 0, b"\0\4\x80\0\0\0\0\4\0\0\0\1"), ErrorCodes.FLOW_CONTROL_ERROR),
    (frame(wire.GOAWAY, 0, 0, b"\0" * 4), ErrorCodes.FRAME_SIZE_ERROR),
    (frame(wire.PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\x02"), ErrorCodes.PROTOCOL_ERROR),
    (frame(wire.PRIORITY, 0, 0, b"12345"), ErrorCodes.PROTOCOL_ERROR),
    (frame(wire.GOAWAY, 0, 1, b"\0" * 8), ErrorCodes.PROTOCOL_ERROR),
    (frame(wire.CONTINUATION, END_HEADERS, 1), ErrorCodes.PROTOCOL_ERROR),
    (frame(HEADERS, 0, 1) + frame(wire.PING, 0, 0, b"12345678"), ErrorCodes.PROTOCOL_ERROR),
    (frame(HEADERS, 0, 1) + frame(wire.CONTINUATION, 0, 3), ErrorCodes.PROTOCOL_ERROR),
    (frame(HEADERS, END_HEADERS, 2), ErrorCodes.PROTOCOL_ERROR),
    (frame(HEADERS, END_HEADERS, 0), ErrorCodes.PROTOCOL_ERROR),
    (frame(HEADERS, END_HEADERS | wire.PADDED, 1, b"\x09abc"), ErrorCodes.PROTOCOL_ERROR),
    (frame(HEADERS, END_HEADERS, 1, b"\xff" * 7), ErrorCodes.COMPRESSION_ERROR),
    (frame(HEADERS, END_HEADERS | wire.PADDED, 1), ErrorCodes.PROTOCOL_ERROR),
    (b"\xff\xff\xff" + frame(DATA, 0, 1)[3:], ErrorCodes.FRAME_SIZE_ERROR),
]
"""What ends a connection that has begun, with the code that RFC 9113 gives it."""


def request(encoder: Encoder, stream: int, flags: int = END_STREAM, *fields: tuple[str, str]) -> bytes:
    """The headers of a request of no protocol."""
    return frame(HEADERS, END_HEADERS | flags, stream, encoder.encode([*REQUEST, *fields]))


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
    def over(self) -> bool:
        return self.ended or self.reset is not None

    @property
    def status(self) -> int:
        """The status of gRPC; -1 if there is none."""
        return int(self.fields.get("grpc-status", -1))

    @property
    def message(self) -> bytes:
        [message] = self.messages()
        return message

    def messages(self) -> list[bytes]:
        found, rest = [], self.data
        while rest:
            size = int.from_bytes(rest[1:5], "big")
            assert rest[0] == 0, "a compressed flag"
            assert len(rest) >= 5 + size, "a message that is cut off"
            found.append(rest[5 : 5 + size])
            rest = rest[5 + size :]
        return found


class Replies:
    """Takes a server's bytes, and sorts its frames by stream."""

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._buffer = FrameBuffer()
        self._buffer.max_frame_size = wire.FRAME_BYTES
        self.streams: dict[int, Reply] = {}

    def frames(self, data: bytes) -> list[Frame]:
        """The frames that are whole now."""
        self._buffer.add_data(data)
        return list(self._buffer)

    @property
    def rest(self) -> bytes:
        """What is no whole frame yet."""
        return bytes(self._buffer._data)

    def take(self, arrived: Frame) -> Reply:
        """Adds a frame; returns its stream's reply."""
        reply = self.streams.setdefault(arrived.stream_id, Reply())
        if isinstance(arrived, HeadersFrame):
            reply.fields |= {str(name): str(value) for name, value in self._decoder.decode(arrived.data)}
        elif isinstance(arrived, DataFrame):
            reply.data += arrived.data
        elif isinstance(arrived, RstStreamFrame):
            reply.reset = arrived.error_code
        reply.ended |= isinstance(arrived, HeadersFrame | DataFrame) and "END_STREAM" in arrived.flags
        return reply


def hear(client: H2Connection, data: bytes, replies: dict[int, Reply]) -> Sequence[events.Event]:
    """What the client of `h2` reads, sorted into replies; it raises where a rule is broken, and opens windows again."""
    heard = client.receive_data(data)
    for event in heard:
        number = getattr(event, "stream_id", None) or 0
        reply = replies.setdefault(number, Reply()) if number else Reply()
        if isinstance(event, events.ResponseReceived | events.TrailersReceived):
            reply.fields |= {bytes(name).decode(): bytes(value).decode() for name, value in event.headers}
        elif isinstance(event, events.DataReceived):
            reply.data += event.data
            client.acknowledge_received_data(event.flow_controlled_length, number)
        elif isinstance(event, events.StreamEnded):
            reply.ended = True
        elif isinstance(event, events.StreamReset):
            reply.reset = int(event.error_code)
    return heard


def of_type(kind: type[F], frames: Iterable[Frame]) -> list[F]:
    return [each for each in frames if isinstance(each, kind)]


def split(data: bytes) -> list[Frame]:
    """The frames that some bytes are made of."""
    replies = Replies()
    found = replies.frames(data)
    assert replies.rest == b""
    return found


def opened_streams(sent: bytes) -> int:
    """The number of streams that a client opened on a connection on which it sent these bytes."""
    client = FrameBuffer(server=True)
    client.max_frame_size = wire.FRAME_BYTES
    client.add_data(sent)
    return len(of_type(HeadersFrame, client))


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
        self._arrived: deque[Frame] = deque()
        self.replies = Replies()
        self.send(PREFACE + (settings() if first is None else first))
        if window:
            self.send(wire.window_update(0, window))

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
            self._arrived.extend(self.replies.frames(data))

    def reply(self, stream: int) -> Reply:
        """The reply on a stream, once it has ended or been reset."""
        reply = self.replies.streams.get(stream)
        if reply is not None and reply.over:
            return reply
        for arrived in self.frames():
            reply = self.replies.take(arrived)
            if arrived.stream_id == stream and reply.over:
                return reply
        raise ConnectionError("the connection ended before the reply")

    def await_frame(self, kind: type[F]) -> F:
        """The next frame of a kind; those before it count as read."""
        for arrived in self.frames():
            self.replies.take(arrived)
            if isinstance(arrived, kind) and not (kind is SettingsFrame and "ACK" in arrived.flags):
                return arrived
        raise AssertionError(f"the connection ended without a {kind.__name__}")

    def goaway(self) -> int:
        """The code of the wire.GOAWAY with which the server closes."""
        code = None
        for arrived in self.frames():
            self.replies.take(arrived)
            if isinstance(arrived, GoAwayFrame):
                code = arrived.error_code
        assert code is not None, "closed without wire.GOAWAY"
        return code
