"""Streams and their flow control (RFC 9113, 5.2): what the peer accepts, and what it may send."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from bertserve.serving.grpc.h2.frames import (
    DATA,
    DEFAULT_WINDOW,
    FRAME_BYTES,
    LARGEST,
    ConnectionFault,
    ErrorCode,
    StreamFault,
    frame_header,
    window_update,
)

if TYPE_CHECKING:
    from bertserve.serving.grpc.h2.headers import Headers


class Stream(msgspec.Struct, eq=False):
    """One stream. Callers only read it, except for `context`.

    Attributes:
        content_length: The length of the body that the peer announced.
        window: Bytes that the peer accepts.
        ended: Whether the peer has ended its side.
        work: The cost of the request, which its answer gives back.
        context: The caller's handler of this stream; dropped when the reply has ended. An answer to a stream without a
            handler gives back no credit.
        closed: Whether it is over: fully answered, or reset.
        delivered: Bytes of the body so far.
        receivable: Bytes that the peer may still send.
        wanted: Bytes that wait for a grant.
        granted: Bytes granted beyond the initial window.
        unsent: Data held back by the peer's window; None if there is none.
        trailers: The header block to send after `unsent`, if it ends the stream.
    """

    number: int
    content_length: int | None
    window: int
    ended: bool
    work: int
    closed: bool = False
    context: Any = None
    delivered: int = 0
    receivable: int = DEFAULT_WINDOW
    wanted: int = 0
    granted: int = 0
    unsent: memoryview | None = None
    trailers: bytes | None = None


# Events are dropped at once, so the garbage collector does not track them.


class RequestReceived(msgspec.Struct, eq=False, gc=False):
    """The headers of a request; `ended` if it has no body."""

    stream: Stream
    headers: Headers
    ended: bool


class DataReceived(msgspec.Struct, eq=False, gc=False):
    """A part of the body; `ended` if it is the last, in which case it may be empty."""

    stream: Stream
    data: bytes
    ended: bool


class DataSent(msgspec.Struct, eq=False, gc=False):
    """All data held back on a stream has been sent, and the reply has not ended."""

    stream: Stream


class StreamReset(msgspec.Struct, eq=False, gc=False):
    """The peer reset a stream, or broke a rule on it. Nobody waits for an answer."""

    stream: Stream
    code: ErrorCode | int


class ConnectionFailed(msgspec.Struct, eq=False, gc=False):
    """The peer broke a rule, and the connection is over. A `StreamReset` for each open stream precedes it."""

    code: ErrorCode
    reason: str


Event = RequestReceived | DataReceived | DataSent | StreamReset | ConnectionFailed


_CONNECTION_WINDOW = 1 << 30
"""The connection's window in bytes. It is never the limit: the windows of the streams are."""

LOW_WINDOW = _CONNECTION_WINDOW // 2
"""Size in bytes below which the connection's window is reopened."""


_SMALL_BYTES = 512
"""Less data than this is not worth a frame if more will follow."""

_DRAINED_BYTES = 1 << 20
"""Maximum held-back data, in bytes, that is sent in one turn."""


class SendingWindow:
    """The peer's windows. Data beyond them is held back.

    A stream whose own window is open waits in a queue for the connection's window. A stream whose own window is closed
    is in no queue: its WINDOW_UPDATE names it. So an update costs only what it releases, however many streams wait.

    A peer that opens windows byte by byte does not get a frame for each (silly window syndrome). Less than
    `_SMALL_BYTES` is sent only if it ends the data, if the peer's initial window is that small, or with `drain_small`.

    Attributes:
        size: Bytes left for all streams.
        stream_size: Bytes of a new stream.
        paused: Whether nothing is sent because the transport's buffer is full.
        drained_frames: Frames of held-back data since this was last set to 0.
        drained_bytes: Bytes of these frames.
    """

    def __init__(self, out: list[bytes | memoryview]) -> None:
        self.size = self.stream_size = DEFAULT_WINDOW
        self.paused = False
        self.drained_frames = self.drained_bytes = 0
        self._out = out
        self._queue: dict[int, Stream] = {}
        self._least = _SMALL_BYTES

    @property
    def ready(self) -> bool:
        """Whether `drain` has left data that could be sent now."""
        stream = next(iter(self._queue.values()), None)
        return stream is not None and self.size >= self._needed(stream) and not self.paused

    def hold(self, stream: Stream, data: bytes) -> None:
        """Sends data as far as the windows allow, and holds back the rest."""
        stream.unsent = memoryview(bytes(stream.unsent) + data if stream.unsent else data)
        if self._enqueue(stream):
            self.drain(LARGEST)

    def forget(self, stream: Stream) -> None:
        stream.unsent = None
        self._queue.pop(stream.number, None)

    def drain(self, most: int = _DRAINED_BYTES) -> list[Stream]:
        """Sends held-back data within the windows, about `most` bytes, one frame of each stream in turn.

        Returns the streams that have no held-back data left.
        """
        queue, done = self._queue, []
        stop = self.drained_bytes + most
        while queue and not self.paused and self.drained_bytes < stop:
            stream = next(iter(queue.values()))
            needed = self._needed(stream)
            if self.size < needed <= stream.window:
                break
            del queue[stream.number]
            if stream.window >= needed and self._write(stream):
                done.append(stream)
            elif stream.window >= self._needed(stream):
                queue[stream.number] = stream
        return done

    def drain_small(self, streams: list[Stream]) -> list[Stream]:
        """Sends what the windows allow, however little; for occasional use. Returns as `drain` does."""
        return [
            stream
            for stream in streams
            if stream.unsent is not None
            and 0 < min(stream.window, self.size) < self._least
            and not self.paused
            and self._write(stream)
        ]

    def grow(self, size: int) -> list[Stream]:
        """Grows the connection's window, and drains."""
        self.size += size
        if not size or self.size > LARGEST:
            raise ConnectionFault(_window_code(size), "WINDOW_UPDATE out of range")
        return self.drain() if self._queue else []

    def grow_stream(self, stream: Stream, size: int) -> list[Stream]:
        stream.window += size
        if not size or stream.window > LARGEST:
            raise StreamFault(_window_code(size))
        return self.drain() if stream.unsent is not None and self._enqueue(stream) else []

    def resize_streams(self, size: int, streams: list[Stream]) -> list[Stream]:
        """Changes the size of every stream's window, and drains."""
        change = size - self.stream_size
        self.stream_size = size
        self._least = max(1, min(_SMALL_BYTES, size // 4))
        for stream in streams:
            stream.window += change
            if stream.window > LARGEST:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE overflows a stream's window")
            if stream.unsent is not None:
                self._enqueue(stream)
        return self.drain()

    def _needed(self, stream: Stream) -> int:
        return min(self._least, len(stream.unsent or b""))

    def _enqueue(self, stream: Stream) -> bool:
        """Queues a stream for the connection's window if its own is open. Returns whether it is alone there."""
        if stream.window < self._needed(stream):
            return False
        self._queue.setdefault(stream.number, stream)
        return len(self._queue) == 1

    def _write(self, stream: Stream) -> bool:
        unsent = stream.unsent or memoryview(b"")
        size = min(len(unsent), FRAME_BYTES, stream.window, self.size)
        self._out += (frame_header(DATA, 0, stream.number, size), unsent[:size])
        self.size -= size
        stream.window -= size
        self.drained_frames += 1
        self.drained_bytes += size
        stream.unsent = unsent[size:] if size < len(unsent) else None
        return stream.unsent is None


class ReceivingWindow:
    """What the peer may send: an initial window on each stream, and more with a grant.

    The total of all grants is bounded. A stream that asks for more than is left waits until others end.

    Attributes:
        size: Bytes left for all streams. Call `open` when it falls below `LOW_WINDOW`.
    """

    def __init__(self, out: list[bytes | memoryview], grantable: int) -> None:
        self._out = out
        self._grantable = grantable
        self._asking: deque[Stream] = deque()
        self.size = DEFAULT_WINDOW

    def open(self) -> None:
        """Opens the connection's window, initially or again.

        Raises:
            ConnectionFault: The peer has sent more than the window.
        """
        if self.size < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "DATA exceeds the connection's window")
        self._out.append(window_update(0, _CONNECTION_WINDOW - self.size))
        self.size = _CONNECTION_WINDOW

    def expect(self, stream: Stream, total: int) -> None:
        missing = total - stream.delivered - stream.receivable
        if missing > 0 and not (stream.wanted or stream.ended or stream.closed):
            stream.wanted = missing
            self._asking.append(stream)
            self._grant()

    def consume(self, stream: Stream, total: int) -> None:
        if stream.closed:
            return
        self._grantable += stream.granted
        stream.granted = 0
        size = DEFAULT_WINDOW - stream.receivable - (stream.delivered - total)
        if size >= DEFAULT_WINDOW // 2 and not stream.ended:
            self._out.append(window_update(stream.number, size))
            stream.receivable += size
        self._grant()

    def forget(self, stream: Stream) -> None:
        self._grantable += stream.granted
        stream.granted = stream.wanted = 0
        self._grant()

    def _grant(self) -> None:
        while self._asking:
            stream = self._asking[0]
            if stream.wanted > self._grantable:
                return
            self._asking.popleft()
            if stream.wanted:
                self._out.append(window_update(stream.number, stream.wanted))
                self._grantable -= stream.wanted
                stream.granted += stream.wanted
                stream.receivable += stream.wanted
                stream.wanted = 0


def _window_code(size: int) -> ErrorCode:
    return ErrorCode.FLOW_CONTROL_ERROR if size else ErrorCode.PROTOCOL_ERROR
