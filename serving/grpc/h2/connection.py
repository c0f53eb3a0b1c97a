"""HTTP/2 on one connection, as a server that knows from the start that its client speaks it (RFC 9113).

Frames are parsed where they arrive and answered in one write. What a client can make the server hold or do is
bounded: header blocks and what they decode to; streams at a time; bytes of requests, because a stream may send
64 KiB and more only against a grant; replies, by flow control and by pausing reading while they are not taken;
time, by a tick once a second; and frames that cost work and bring none (pings, settings, resets, empty data),
by a credit that every answered call and every second renews. Whoever overdraws it gets ENHANCE_YOUR_CALM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from serving.grpc.h2 import frames
from serving.grpc.h2.frames import (
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    FRAME,
    FRAME_BYTES,
    LARGEST,
    PREFACE,
    Code,
    ConnectionFault,
    Setting,
    StreamFault,
)
from serving.grpc.h2.headers import DECODING_FACTOR, HeaderReader
from serving.grpc.h2.sending import CREDIT, Sender
from serving.net.ports import lifetime_s

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from serving.grpc.h2.streams import Application, Stream

MAX_STREAMS = 256

_CREDIT_PER_S = 100

_CONNECTION_WINDOW = 1 << 30
"""What streams may send is bounded by their own windows; this one is never in the way."""

_FRAME_COST = 256
"""What a CONTINUATION counts for beside its bytes: many small ones are refused like a few large ones."""

_PING = b"draining"


class Http2Connection(Sender):
    """One connection."""

    def __init__(self, application: Application) -> None:
        """Waits for its transport."""
        super().__init__(application)
        settings = application.settings
        self._header_bytes = DECODING_FACTOR * settings.header_limit_bytes
        self._headers = HeaderReader[Any](application.read_head, settings.header_limit_bytes)
        self._last = 0
        self._rest = b""
        self._take: Callable[[bytes], None] = self._take_preface
        self._greeted = False
        self._block: bytearray | None = None
        self._block_flags = self._block_stream = self._block_cost = 0
        self._receivable = DEFAULT_WINDOW
        self._unfinished_s = 0.0
        self._draining_s: float | None = None
        self._lifetime_s = lifetime_s(settings)
        self._on_frame: tuple[Callable[[int, int, bytes], None], ...] = (
            self._on_data,
            self._on_headers,
            self._on_priority,
            self._on_rst_stream,
            self._on_settings,
            self._on_push_promise,
            self._on_ping,
            self._on_goaway,
            self._on_window_update,
            self._on_continuation,
        )

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Waits for the preface; over TLS, ends what has not agreed on HTTP/2 (RFC 9113, 3.2)."""
        self._transport = cast("asyncio.Transport", transport)
        self._application.connections.add(self)
        secured = transport.get_extra_info("ssl_object")
        if secured is not None and secured.selected_alpn_protocol() != "h2":
            self._over = True
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  how it ended does not matter
        """Cancels the calls under way: their client has gone."""
        self._application.connections.discard(self)
        self._abandon()

    def data_received(self, data: bytes) -> None:
        """Parses, and sends what that makes due."""
        if self._over:
            return
        try:
            if self._rest:
                data = self._rest + data
            elif self._greeted and self._block is None:
                self._unfinished_s = 0.0
            self._take(data)
        except ConnectionFault as fault:
            self._fail(fault)
        else:
            self._send_control()

    # What the port calls.

    def tick(self, seconds: float) -> None:
        """Renews the credit and ends what has taken too long; called every so many seconds."""
        settings = self._application.settings
        self._credit = min(CREDIT, self._credit + round(_CREDIT_PER_S * seconds))
        self._unfinished_s += seconds
        self._paused_s += seconds
        if self._over:
            return
        if (self._paused and self._paused_s > settings.body_timeout_s) or (
            not self._greeted and self._unfinished_s > settings.header_timeout_s
        ):
            self._transport.abort()
            return
        try:
            self._age(seconds)
        except ConnectionFault as fault:
            self._fail(fault)
        self._lifetime_s -= seconds
        if self._lifetime_s <= 0 and self._greeted and not self._over:
            self._retire()
        if self._draining_s is not None and not self._over:
            self._draining_s += seconds
            if self._draining_s > seconds:
                self._announce_last()
        self._send_control()

    def drain(self) -> None:
        """The server ends: takes leave of the client, and of calls that would go on as long as it does."""
        if not self._greeted:
            self._transport.abort()
        elif not self._over:
            for stream in list(self._streams.values()):
                stream.draining()
            self._retire()

    def keys_changed(self) -> None:
        """Reads all headers anew from now on, and asks the streams that are there."""
        self._headers.forget()
        for stream in list(self._streams.values()):
            stream.keys_changed()
        self._send_control()

    def end(self) -> None:
        """Ends the connection now."""
        if not self._over:
            self._fail(ConnectionFault(Code.NO_ERROR, "the server ends"))

    # Parsing.

    def _take_preface(self, data: bytes) -> None:
        if not data.startswith(PREFACE[: len(data)]):
            self._over = True
            self._transport.close()  # another protocol, in which there is nothing to say
        elif len(data) < len(PREFACE):
            self._rest = data
        else:
            settings = self._application.settings
            ours = {
                Setting.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                Setting.MAX_HEADER_LIST_SIZE: settings.header_limit_bytes,
            }
            self._receivable = _CONNECTION_WINDOW
            self._control += (frames.settings(ours), frames.window_update(0, _CONNECTION_WINDOW - DEFAULT_WINDOW))
            self._take = self._take_frames
            self._take_frames(data[len(PREFACE) :])

    def _take_frames(self, data: bytes) -> None:
        at, end = 0, len(data)
        while end - at >= FRAME.size:
            high, low, kind, flags, number = FRAME.unpack_from(data, at)
            size = high << 8 | low
            if size > FRAME_BYTES:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            start = at + FRAME.size
            if end - start < size:
                break
            at = start + size
            number &= LARGEST
            if not self._greeted and kind != frames.SETTINGS:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            if self._block is not None and (kind != frames.CONTINUATION or number != self._block_stream):
                raise ConnectionFault(Code.PROTOCOL_ERROR, "another frame inside a header block")
            if kind <= frames.CONTINUATION:
                try:
                    self._on_frame[kind](flags, number, data[start:at])
                except StreamFault as fault:
                    self._reset(number, fault.code)
        if at and self._block is None:
            self._unfinished_s = 0.0
        self._rest = data[at:]

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._receivable -= size
        if self._receivable < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "data beyond the connection's window")
        if self._receivable < _CONNECTION_WINDOW // 2:
            self._control.append(frames.window_update(0, _CONNECTION_WINDOW - self._receivable))
            self._receivable = _CONNECTION_WINDOW
        stream = self._streams.get(number)
        if stream is None or stream.ended:
            if number not in self._cut:
                self._check_known(number)
                raise StreamFault(Code.STREAM_CLOSED)
            self._spend()
            return
        stream.receivable -= size
        if stream.receivable < 0:
            raise StreamFault(Code.FLOW_CONTROL_ERROR)
        if flags & frames.PADDED:
            payload = frames.unpadded(payload, frames.PADDED)
        stream.ended = bool(flags & END_STREAM)
        if not payload and not stream.ended:
            self._spend()
        stream.received(payload)

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & (frames.PADDED | frames.PRIORITISED):
            payload = frames.unpadded(payload, flags)
        if flags & END_HEADERS:
            self._on_block(flags, number, payload)
        else:
            self._block = bytearray(payload)
            self._block_flags, self._block_stream, self._block_cost = flags, number, len(payload)

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._block += payload
        self._block_cost += len(payload) + _FRAME_COST
        if self._block_cost > self._header_bytes + _FRAME_COST:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "headers far beyond the limit")
        if flags & END_HEADERS:
            block, self._block = bytes(self._block), None
            self._on_block(self._block_flags, number, block)

    def _on_block(self, flags: int, number: int, block: bytes) -> None:
        stream = self._streams.get(number)
        if stream is not None or number in self._cut:
            self._headers.skip(block)  # trailers, which say nothing to a server of gRPC
            self._on_trailers(stream, flags)
            return
        if number <= self._last or not number & 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a stream's number that is not a new one of the client's")
        self._last = number
        head = self._headers.read(block)
        if self._final is not None or len(self._streams) >= MAX_STREAMS:
            raise StreamFault(Code.REFUSED_STREAM)
        stream = self._application.open(self, number, head)
        stream.window = self._stream_window
        stream.ended = bool(flags & END_STREAM)
        self._streams[number] = stream
        stream.opened()
        if stream.ended and number in self._streams:
            stream.received(b"")

    def _on_trailers(self, stream: Stream | None, flags: int) -> None:
        if stream is None:
            self._spend()
        elif stream.ended:
            raise StreamFault(Code.STREAM_CLOSED)
        elif not flags & END_STREAM:
            raise StreamFault(Code.PROTOCOL_ERROR)
        else:
            stream.ended = True
            stream.received(b"")

    def _on_priority(self, _: int, number: int, payload: bytes) -> None:
        if not number:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PRIORITY of the connection")
        if len(payload) != 5:  # noqa: PLR2004  and says nothing any more (section 5.3.2)
            raise StreamFault(Code.FRAME_SIZE_ERROR)

    def _on_rst_stream(self, _: int, number: int, payload: bytes) -> None:
        frames.number(payload)
        self._check_known(number)
        self._spend()
        stream = self._streams.get(number)
        if stream is not None:
            self._forget(stream)
            stream.lost()

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS that acknowledge and set")
            return
        values = frames.read_settings(payload)
        if values.get(Setting.ENABLE_PUSH, 0) > 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "ENABLE_PUSH out of range")
        if not FRAME_BYTES <= values.get(Setting.MAX_FRAME_SIZE, FRAME_BYTES) < 1 << 24:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "MAX_FRAME_SIZE out of range")
        self._set_stream_window(values.get(Setting.INITIAL_WINDOW_SIZE, self._stream_window))
        self._control.append(frames.frame(frames.SETTINGS, frames.ACK, 0))
        if self._greeted:
            self._spend()
        self._greeted = True

    def _on_push_promise(self, _: int, __: int, ___: bytes) -> None:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "PUSH_PROMISE of a client")

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != len(_PING):
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a PING that is not 8 bytes")
        self._spend()
        if not flags & frames.ACK:
            self._control.append(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif self._draining_s is not None and payload == _PING:
            self._announce_last()

    def _on_goaway(self, _: int, number: int, __: bytes) -> None:
        """The client will close when its calls are answered."""
        if number:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "GOAWAY of a stream")
        self._spend()

    def _on_window_update(self, _: int, number: int, payload: bytes) -> None:
        size = frames.number(payload) & LARGEST
        if not number:
            self._window += size
            if not size or self._window > LARGEST:
                raise ConnectionFault(_window_code(size), "a WINDOW_UPDATE out of range")
        else:
            self._check_known(number)
            stream = self._streams.get(number)
            if stream is None:
                return
            stream.window += size
            if not size or stream.window > LARGEST:
                raise StreamFault(_window_code(size))
        if self._blocked:
            self._send_blocked()

    # Streams.

    def _check_known(self, number: int) -> None:
        if not number or number > self._last or not number & 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame of a stream that was never opened")

    def _age(self, seconds: float) -> None:
        limit_s = self._application.settings.body_timeout_s
        if (self._rest or self._block is not None) and self._unfinished_s > limit_s:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame or header block that does not end")
        for stream in list(self._streams.values()):
            if stream.unsent is None and (stream.ended or stream.wanted or stream.idle):
                continue  # it waits for its answer or a grant, not for its client, or for nothing
            stream.waited_s += seconds
            if stream.waited_s <= limit_s:
                continue
            if stream.unsent is None:
                stream.too_slow()
            else:
                self._reset(stream.number, Code.CANCEL)

    def _abandon(self) -> None:
        self._over = True
        streams = list(self._streams.values())
        self._streams.clear()
        self._blocked.clear()
        for stream in streams:
            stream.lost()

    # The end.

    def _retire(self) -> None:
        """Asks the client to start no more calls here; ends the connection after the last one.

        First every stream is still welcome; which was the last is said once the client has heard that, so that
        no call is lost that was on its way.
        """
        if self._draining_s is None:
            self._draining_s = 0.0
            self._control += (frames.goaway(LARGEST, Code.NO_ERROR), frames.frame(frames.PING, 0, 0, _PING))
        self._send_control()

    def _announce_last(self) -> None:
        if self._final is None:
            self._final = self._last
            self._control.append(frames.goaway(self._final, Code.NO_ERROR))
            if not self._streams:
                self._finish()

    def _fail(self, fault: ConnectionFault) -> None:
        self._abandon()
        last = self._last if self._final is None else self._final
        self._control.append(frames.goaway(last, fault.code, fault.words))
        self._finish()


def _window_code(size: int) -> Code:
    return Code.FLOW_CONTROL_ERROR if size else Code.PROTOCOL_ERROR
