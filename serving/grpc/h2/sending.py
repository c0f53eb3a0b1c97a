"""What a connection of HTTP/2 sends: replies, as far as the client's windows reach, and leave to send more.

The half of a connection that streams talk to. Nothing here reads what the client says; `http2` does, and tells it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from serving.grpc.h2 import frames
from serving.grpc.h2.frames import (
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES,
    LARGEST,
    Code,
    ConnectionFault,
)

if TYPE_CHECKING:
    from serving.grpc.h2.streams import Application, Stream

CREDIT = 1000
"""Frames that bring no work, in a burst; each answered call gives one back."""

_GRANTED_MESSAGES = 4
"""Messages of the largest size that a connection may be sending at a time; further ones wait for their turn."""

_LINGER_S = 1.0
"""How long what a refused client still sends is read and thrown away, so that it can read the refusal."""

_CUT_STREAMS = 64
"""Streams answered before their end of which late frames are expected."""


class Sender(asyncio.Protocol):
    """The streams of one connection, and what goes out on them."""

    _transport: asyncio.Transport

    def __init__(self, application: Application) -> None:
        """Waits for its transport."""
        self._application = application
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, Stream] = {}
        self._cut: deque[int] = deque(maxlen=_CUT_STREAMS)
        self._grantable = _GRANTED_MESSAGES * application.settings.body_limit_bytes
        self._asking: deque[Stream] = deque()
        self._window = self._stream_window = DEFAULT_WINDOW
        self._blocked: dict[int, Stream] = {}
        self._control: list[bytes] = []
        self._credit = CREDIT
        self._paused_s = 0.0
        self._paused = self._over = False
        self._final: int | None = None

    # What the event loop calls.

    def pause_writing(self) -> None:
        """The client does not read: it is not read either, until it does or the tick ends it."""
        self._paused, self._paused_s = True, 0.0
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It reads again."""
        self._paused = False
        self._transport.resume_reading()
        self._send_blocked()

    # What streams call.

    def want(self, stream: Stream, size: int) -> None:
        """Lets the client send so many bytes more on a stream, now or when others have ended."""
        if not stream.wanted:
            stream.wanted = size
            self._asking.append(stream)
            self._grant()

    def renew(self, stream: Stream, held: int) -> None:
        """Lets the client go on sending on a stream of messages, once some have been taken.

        Args:
            stream: The stream; what had been granted for the messages taken is given back.
            held: Bytes of it that have not been taken.
        """
        if self._streams.get(stream.number) is not stream:
            return
        self._grantable += stream.granted
        stream.granted = 0
        size = DEFAULT_WINDOW - stream.receivable - held
        if size >= DEFAULT_WINDOW // 2 and not stream.ended:
            self._control.append(frames.window_update(stream.number, size))
            stream.receivable += size
        self._grant()
        self._send_control()

    def reply(self, stream: Stream, block: bytes | None, data: bytes, trailers: bytes | None) -> None:
        """Sends a reply or a part of it; in one write where flow control does not hold it up.

        Args:
            stream: The stream; where it is gone, nothing is sent.
            block: The header block, if it has not been sent.
            data: The data; may be empty.
            trailers: The header block that ends the reply, if this is its end.
        """
        number = stream.number
        if self._streams.get(number) is not stream:
            return
        size = len(data)
        parts: list[bytes | memoryview] = []
        if block is not None:
            parts += (frames.head(frames.HEADERS, END_HEADERS, number, len(block)), block)
        fits = not size or (size <= FRAME_BYTES and size <= self._window and size <= stream.window)
        if fits and stream.unsent is None and not self._paused:
            if size:
                parts += (frames.head(frames.DATA, 0, number, size), data)
                self._window -= size
                stream.window -= size
            if trailers is not None:
                self._end(stream, trailers, parts)
            self._write(parts)
            return
        self._write(parts)
        stream.unsent = memoryview(bytes(stream.unsent) + data if stream.unsent else data)
        stream.trailers = trailers
        stream.waited_s = 0.0
        self._blocked[number] = stream
        self._send_blocked()

    def refuse(self, stream: Stream, block: bytes) -> None:
        """A reply that is one header block."""
        if self._streams.get(stream.number) is stream:
            parts: list[bytes | memoryview] = []
            self._end(stream, block, parts)
            self._write(parts)

    async def taken(self, stream: Stream) -> None:
        """Waits until the client's window has taken what was sent on a stream."""
        if stream.unsent is not None:
            stream.taken = self._loop.create_future()
            await stream.taken

    # Streams.

    def _set_stream_window(self, size: int) -> None:
        change = size - self._stream_window
        self._stream_window = size
        for stream in self._streams.values():
            stream.window += change
        if size > LARGEST or any(stream.window > LARGEST for stream in self._streams.values()):
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE out of range")
        self._send_blocked()

    def _spend(self) -> None:
        self._credit -= 1
        if self._credit < 0:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too_many_pings or other frames without work")

    def _reset(self, number: int, code: Code) -> None:
        stream = self._streams.get(number)
        if stream is None or not stream.ended:
            self._cut.append(number)
        if stream is not None:
            self._forget(stream)
            stream.lost()
        self._control.append(frames.rst_stream(number, code))
        self._spend()

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.number]
        self._blocked.pop(stream.number, None)
        if stream.granted or stream.wanted:
            self._grantable += stream.granted
            stream.wanted = 0
            self._grant()
            self._send_control()
        if stream.taken is not None and not stream.taken.done():
            stream.taken.set_result(None)
        if self._final is not None and not self._streams:
            self._finish()

    def _grant(self) -> None:
        while self._asking:
            stream = self._asking[0]
            if stream.wanted > self._grantable:
                return
            self._asking.popleft()
            if stream.wanted:
                self._control.append(frames.window_update(stream.number, stream.wanted))
                self._grantable -= stream.wanted
                stream.granted += stream.wanted
                stream.receivable += stream.wanted
                stream.wanted = 0

    # Sending.

    def _write(self, parts: list[bytes | memoryview]) -> None:
        if self._control:
            parts = [*self._control, *parts]
            self._control.clear()
        if parts:
            self._transport.write(b"".join(parts))

    def _send_control(self) -> None:
        if self._control:
            self._write([])

    def _send_blocked(self) -> None:
        for stream in list(self._blocked.values()):
            if self._paused or self._window <= 0:
                return
            self._send_unsent(stream)

    def _send_unsent(self, stream: Stream) -> None:
        parts: list[bytes | memoryview] = []
        unsent = stream.unsent or memoryview(b"")
        while (size := min(len(unsent), FRAME_BYTES, stream.window, self._window)) > 0:
            parts += (frames.head(frames.DATA, 0, stream.number, size), unsent[:size])
            unsent = unsent[size:]
            self._window -= size
            stream.window -= size
        if unsent:
            stream.unsent = unsent
        else:
            stream.unsent = None
            del self._blocked[stream.number]
            if stream.trailers is not None:
                self._end(stream, stream.trailers, parts)
            elif stream.taken is not None and not stream.taken.done():
                stream.taken.set_result(None)
        self._write(parts)

    def _end(self, stream: Stream, block: bytes, parts: list[bytes | memoryview]) -> None:
        """Adds the frames that end a reply, and forgets the stream."""
        number = stream.number
        parts += (frames.head(frames.HEADERS, END_HEADERS | END_STREAM, number, len(block)), block)
        if not stream.ended:
            self._cut.append(number)
            parts.append(frames.rst_stream(number, Code.NO_ERROR))
        if self._credit < CREDIT:
            self._credit += 1
        self._forget(stream)

    # The end.

    def _finish(self) -> None:
        """Says no more, and listens a moment longer, so that what was said is read."""
        self._loop.call_soon(self._close)

    def _close(self) -> None:
        self._over = True
        if self._transport.is_closing():
            return
        self._send_control()
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._transport.resume_reading()
        else:
            self._transport.close()  # TLS says so itself, and throws away what still comes
        self._loop.call_later(_LINGER_S, self._transport.abort)
