"""Flow control (RFC 9113, 5.2): data as far as the peer's windows reach, and leave for the peer to send more."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

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
    from serving.grpc.h2.streams import Stream

_CONNECTION_WINDOW = 1 << 30
"""What streams may send is bounded by their own windows; this one is never in the way."""

LOW_WINDOW = _CONNECTION_WINDOW // 2
"""At which the connection's window is opened again."""


class SendingWindow:
    """What the peer accepts; data beyond that is held back.

    Attributes:
        size: Bytes of all streams.
        stream_size: Bytes of a new stream.
        paused: Whether nothing goes out, because the transport's buffer is full.
    """

    def __init__(self, out: list[bytes | memoryview]) -> None:
        self.size = self.stream_size = DEFAULT_WINDOW
        self.paused = False
        self._out = out
        self._held: dict[int, Stream] = {}

    def hold(self, stream: Stream, data: bytes) -> None:
        """Sends data as far as windows reach, and holds the rest back."""
        stream.unsent = memoryview(bytes(stream.unsent) + data if stream.unsent else data)
        self._held[stream.number] = stream
        self._send_held(stream)

    def forget(self, stream: Stream) -> None:
        stream.unsent = None
        del self._held[stream.number]

    def resume(self) -> list[Stream]:
        """Sends what is held back, as far as windows reach; the streams of which nothing is any more."""
        return [stream for stream in list(self._held.values()) if self.size > 0 and self._send_held(stream)]

    def grow(self, size: int) -> list[Stream]:
        """Grows the window of all streams, as `resume`."""
        was_closed = self.size <= 0
        self.size += size
        if not size or self.size > LARGEST:
            raise ConnectionFault(_window_code(size), "a WINDOW_UPDATE out of range")
        return self.resume() if was_closed else []

    def grow_stream(self, stream: Stream, size: int) -> bool:
        """Grows the window of one stream; whether all that was held back is out now."""
        stream.window += size
        if not size or stream.window > LARGEST:
            raise StreamFault(_window_code(size))
        return stream.unsent is not None and self._send_held(stream)

    def resize_streams(self, size: int, streams: list[Stream]) -> list[Stream]:
        """Changes the size of every stream's window, as `resume`."""
        change = size - self.stream_size
        self.stream_size = size
        for stream in streams:
            stream.window += change
        if size > LARGEST or any(stream.window > LARGEST for stream in streams):
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE out of range")
        return self.resume() if change > 0 else []

    def _send_held(self, stream: Stream) -> bool:
        unsent = stream.unsent or memoryview(b"")
        while not self.paused and (size := min(len(unsent), FRAME_BYTES, stream.window, self.size)) > 0:
            self._out += (frame_header(DATA, 0, stream.number, size), unsent[:size])
            unsent = unsent[size:]
            self.size -= size
            stream.window -= size
        if unsent:
            stream.unsent = unsent
            return False
        self.forget(stream)
        return True


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
