"""Streams and their flow control (RFC 9113, 5.2): data as far as windows reach, and leave for the peer to send more."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from serving.grpc.h2.frames import (
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
    from serving.grpc.h2.headers import Headers


class Stream(msgspec.Struct, eq=False):
    """One stream. Its caller only reads it, but for `context`.

    Attributes:
        content_length: How long the peer said that the body would be.
        window: Bytes that the peer accepts.
        ended: Whether the peer has sent all it will send.
        work: What its request has cost, which its answer gives back.
        context: For the caller: whatever handles this stream; dropped when the reply has ended. An answer to a stream
            that nothing handles gives no credit back.
        closed: Whether it is over: answered to the end, or reset.
        delivered: Bytes of the body so far.
        receivable: Bytes that the peer may still send.
        wanted: Bytes that wait to be granted.
        granted: Bytes granted beyond the first window.
        unsent: Data that waits for the peer's window; None if there is none.
        trailers: The header block that follows it, if that ends the stream.
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


# The garbage collector does not follow events: they are dropped at once.


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
    """The peer's window has taken all that was held back on a stream that is not at its end."""

    stream: Stream


class StreamReset(msgspec.Struct, eq=False, gc=False):
    """The peer gave a stream up, or broke a rule on it: nobody waits for an answer."""

    stream: Stream
    code: ErrorCode | int


class ConnectionFailed(msgspec.Struct, eq=False, gc=False):
    """The peer broke a rule, and the connection is over; a `StreamReset` of each open stream came before."""

    code: ErrorCode
    reason: str


Event = RequestReceived | DataReceived | DataSent | StreamReset | ConnectionFailed


_CONNECTION_WINDOW = 1 << 30
"""What streams may send is bounded by their own windows; this one is never in the way."""

LOW_WINDOW = _CONNECTION_WINDOW // 2
"""At which the connection's window is opened again."""


_SMALL_BYTES = 512
"""Less than that is not worth a frame, if more is to come."""

_DRAINED_BYTES = 1 << 20
"""Of what was held back goes out in one turn at most."""


class SendingWindow:
    """What the peer accepts; data beyond that is held back.

    A stream whose own window is open waits in a queue for the connection's. One whose own window is closed is in no
    queue: its own WINDOW_UPDATE finds it. So an update costs what it lets out, however many streams wait.

    A peer that opens windows byte by byte does not get a frame for each: less than `_SMALL_BYTES` goes out only where
    it ends the data, where the peer's first window is no larger, or with `drain_small`.

    Attributes:
        size: Bytes of all streams.
        stream_size: Bytes of a new stream.
        paused: Whether nothing goes out, because the transport's buffer is full.
        drained_frames: Frames of data that was held back, since this was last set to 0.
        drained_bytes: Their bytes.
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
        """Whether data could go out now; `drain` left it for another turn."""
        stream = next(iter(self._queue.values()), None)
        return stream is not None and self.size >= self._needed(stream) and not self.paused

    def hold(self, stream: Stream, data: bytes) -> None:
        """Sends data as far as windows reach, and holds the rest back."""
        stream.unsent = memoryview(bytes(stream.unsent) + data if stream.unsent else data)
        if self._enqueue(stream):
            self.drain(LARGEST)

    def forget(self, stream: Stream) -> None:
        stream.unsent = None
        self._queue.pop(stream.number, None)

    def drain(self, most: int = _DRAINED_BYTES) -> list[Stream]:
        """Sends what is held back, as far as windows and so many bytes reach, a frame of each stream in turn.

        Returns the streams of which nothing is held back any more.
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
        """Sends what windows allow however little that is, as `drain`; for once in a while."""
        return [
            stream
            for stream in streams
            if stream.unsent is not None
            and 0 < min(stream.window, self.size) < self._least
            and not self.paused
            and self._write(stream)
        ]

    def grow(self, size: int) -> list[Stream]:
        """Grows the window of all streams, as `drain`."""
        self.size += size
        if not size or self.size > LARGEST:
            raise ConnectionFault(_window_code(size), "a WINDOW_UPDATE out of range")
        return self.drain()

    def grow_stream(self, stream: Stream, size: int) -> list[Stream]:
        stream.window += size
        if not size or stream.window > LARGEST:
            raise StreamFault(_window_code(size))
        return self.drain() if self._enqueue(stream) else []

    def resize_streams(self, size: int, streams: list[Stream]) -> list[Stream]:
        """Changes the size of every stream's window, as `drain`."""
        change = size - self.stream_size
        self.stream_size = size
        self._least = max(1, min(_SMALL_BYTES, size // 4))
        for stream in streams:
            stream.window += change
            if stream.window > LARGEST:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE opens a window too far")
            self._enqueue(stream)
        return self.drain()

    def _needed(self, stream: Stream) -> int:
        return min(self._least, len(stream.unsent or b""))

    def _enqueue(self, stream: Stream) -> bool:
        """Lets a stream wait for the connection's window if its own is open; whether nothing else waits for that."""
        if stream.unsent is None or stream.window < self._needed(stream):
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
    """What the peer may send: a first window on each stream, and more of it against a grant.

    All grants together are bounded; a stream that asks for more than is left waits until others end.

    Attributes:
        size: Bytes of all streams; `open` it again below `LOW_WINDOW`.
    """

    def __init__(self, out: list[bytes | memoryview], grantable: int) -> None:
        self._out = out
        self._grantable = grantable
        self._asking: deque[Stream] = deque()
        self.size = DEFAULT_WINDOW

    def open(self) -> None:
        """Opens the connection's own window, at first or again; data beyond it was a fault."""
        if self.size < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "data beyond the connection's window")
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
