"""The server side of one HTTP/2 connection (RFC 9113): bytes in, events and bytes out.

`Limits` bounds what a peer can make the connection hold or do:

- header blocks, and what they decode to
- concurrent streams
- bytes of requests: a stream may send 64 KiB, and more only with a grant
- bytes of replies, by the peer's windows
- work in one turn of the caller's loop
- work that leads to no answer, by a credit

The package reads no clock: the caller measures time.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

from bertserve.serving.grpc.h2 import frames
from bertserve.serving.grpc.h2.flow import (
    LOW_WINDOW,
    ConnectionFailed,
    DataReceived,
    DataSent,
    ReceivingWindow,
    RequestReceived,
    SendingWindow,
    Stream,
    StreamReset,
)
from bertserve.serving.grpc.h2.frames import (
    CONTINUATION,
    CONTINUATION_BYTES,
    END_HEADERS,
    END_STREAM,
    FRAME,
    FRAME_BYTES,
    FRAME_HEADER_BYTES,
    HEADERS,
    LARGEST,
    REPLY_CREDIT,
    REQUEST_WORK,
    RESET_WORK,
    SMALL_DATA_WORK,
    WINDOW_WORK,
    ConnectionFault,
    ErrorCode,
    Setting,
    StreamFault,
)
from bertserve.serving.grpc.h2.headers import DEFAULT_TABLE_BYTES, RESIZED_TABLE, HeaderDecoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.serving.grpc.h2.flow import Event
    from bertserve.serving.grpc.h2.frames import Limits

_pack, _unpack = FRAME.pack, FRAME.unpack_from

_HEADERS_FLAGS = END_HEADERS | frames.PADDED | frames.PRIORITISED

_FRAME_TYPES = 256

_LATE_STREAMS = 64
"""Number of remembered streams that were closed before the peer ended them. Late frames are expected on these."""

_SKIPPED_NUMBERS = 64
"""Number of remembered ranges of stream numbers that the peer skipped. These streams were never opened, so they are not
closed either."""

_TOO_MUCH = "too_many_pings or other frames without effect"

_SMALL_DATA_BYTES = 512
"""A larger DATA frame gives back more credit than it costs. A smaller one is work, unless it is the last."""

_DRAINING_PINGS = b"draining", b"drained?"


class H2Phase(IntEnum):
    """The life of a connection, which only goes forward."""

    GREETING = 0
    """The peer's first SETTINGS have not arrived."""
    OPEN = 1
    DRAINING = 2
    """The peer was asked to open no more streams. Those in transit are accepted."""
    DRAINED = 3
    """The peer was told the last stream. Further ones are refused."""
    FINISHED = 4


_OPEN, _DRAINING, _DRAINED, _FINISHED = H2Phase.OPEN, H2Phase.DRAINING, H2Phase.DRAINED, H2Phase.FINISHED


class H2Connection:
    """One connection to a peer that is known to speak HTTP/2.

    Attributes:
        phase: Write `data_to_send()` when it becomes `FINISHED`, then close.
        begun: Whether the peer's preface has arrived. Before that, nothing can be sent to it.
        pending: Whether the turn's work was used up before all bytes were read. Call `receive(b"")` on the next turn.
        overdrawn: Whether a single frame took much more than the rest of the turn's work. Pass further data to
            `receive` on a later turn, as if it were pending.
        progress: Increases whenever a frame, or a header block in several frames, is complete.
        outgoing: The output buffer of `data_to_send`.
        pongs: Answers to pings, which `data_to_send` returns after `outgoing`.
        last_stream: The number of the last stream that the peer opened; 0 before the first.
        expect: Lets the peer send until a body has the given size. Waits until other streams have returned enough of
            their grants.
        forget_headers: Forgets every `Headers.memo`.
        consume: Reopens a stream's window after the given number of bytes of its body has been processed.
    """

    def __init__(self, limits: Limits, credit: int | None = None) -> None:
        """`credit` is the initial credit; None means all of `Limits.credit`."""
        self.phase = H2Phase.GREETING
        self.begun = self.pending = self.overdrawn = False
        self.progress = 0
        self._limits = limits
        self.outgoing: list[bytes | memoryview] = []
        self.pongs: list[bytes] = []
        self._events: list[Event] = []
        self._headers = HeaderDecoder(limits)
        self.forget_headers = self._headers.forget
        self._known_blocks = self._headers.known
        self._sending = SendingWindow(self.outgoing)
        self._receiving = ReceivingWindow(self.outgoing, limits.granted_bytes)
        self.expect = self._receiving.expect
        self.consume = self._receiving.consume
        self._streams: dict[int, Stream] = {}
        self._late: deque[int] = deque(maxlen=_LATE_STREAMS)
        self._skipped: deque[range] = deque(maxlen=_SKIPPED_NUMBERS)
        self.last_stream = self._final = 0
        self._resize_table = False
        self._credit = self._first_credit = limits.credit if credit is None else credit
        self._work = 0
        self._rest = b""
        self._block: bytearray | None = None
        self._block_flags = self._block_stream = self._block_cost = 0

    # Called by the caller's transport.

    def receive(self, data: bytes) -> list[Event]:
        """Reads data from the peer, up to one turn's work (`pending`)."""
        if self.phase is _FINISHED:
            self.pending = False
            return []
        if self._rest:
            data = self._rest + data
        self._work = work = self._limits.turn_work
        try:
            if self.pending:
                self.pending = False
                self._resume_streams(self._sending.drain())
            if self.begun or self._take_preface(data):
                self._take_frames(data, 0 if self.begun else len(frames.PREFACE))
        except ConnectionFault as fault:
            self._fail(fault)
        self._credit -= work - self._work
        self.overdrawn = self._work < -(work >> 2) and self.phase is not _FINISHED
        if self._credit < 0 and self.phase is not _FINISHED:
            self._fail(ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, _TOO_MUCH))
        # Not kept in the attribute, where an idle connection would hold the data of its last read.
        events, self._events = self._events, []
        return events

    def data_to_send(self) -> bytes:
        """Bytes to write to the peer. Call this after any other method."""
        out = self.outgoing
        if self.pongs:
            out += self.pongs
            self.pongs.clear()
        if not out:
            return b""
        data = b"".join(out)
        out.clear()
        return data

    def pause(self) -> None:
        """Holds back data from now on: the transport's buffer is full."""
        self._sending.paused = True

    def resume(self) -> list[Event]:
        self._sending.paused = False
        self._resume_streams(self._sending.drain())
        return self._take_events()

    def renew(self, seconds: float) -> list[Event]:
        """Gives back credit for the elapsed seconds, and sends data that small windows held back."""
        self._credit = min(self._limits.credit, self._credit + round(self._limits.credit_per_s * seconds))
        self._resume_streams(self._sending.drain_small(self.streams))
        return self._take_events()

    @property
    def finished(self) -> bool:
        return self.phase is _FINISHED

    @property
    def spent(self) -> int:
        """The credit used so far. It is all of it if the peer was disconnected for its cost."""
        return self._first_credit - self._credit

    @property
    def partial(self) -> bool:
        """Whether a frame or header block is incomplete."""
        return bool(self._rest) or self._block is not None

    @property
    def streams(self) -> list[Stream]:
        return list(self._streams.values())

    # Replies.

    def send(self, stream: Stream, headers: bytes | None, data: bytes = b"", trailers: bytes | None = None) -> None:
        """Sends a reply or a part of it. Does nothing if the stream is closed.

        `headers` and `trailers` are header blocks; `trailers` ends the stream. Data beyond the peer's window is held
        back (`Stream.unsent`). A `DataSent` event follows when it has been sent.
        """
        if stream.closed:
            return
        out, number = self.outgoing, stream.number
        if headers is not None:
            if len(headers) > FRAME_BYTES or self._resize_table:
                out.append(self._header_frames(0, number, headers))
            else:
                out += (_pack(len(headers) << 8 | HEADERS, END_HEADERS, number), headers)
        if size := len(data):
            self._credit += REPLY_CREDIT
            sending = self._sending
            fits = size <= FRAME_BYTES and size <= stream.window and size <= sending.size and not sending.paused
            if fits and stream.unsent is None:  # data that is held back goes first, even if a window has room for this
                sending.size -= size
                stream.window -= size
                out += (_pack(size << 8, 0, number), data)
            else:
                sending.hold(stream, data)
        if trailers is not None:
            if stream.unsent is None:
                self._end(stream, trailers)
            else:
                stream.trailers = trailers

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        if not stream.closed:
            if not stream.ended:
                self._late.append(stream.number)
            self.outgoing.append(frames.rst_stream(stream.number, code))
            self._close(stream)

    # The end.

    def begin_drain(self) -> None:
        """Asks the peer to open no more streams on this connection, if it is open.

        New streams are accepted until the peer has acknowledged that by two pings, or until `end_drain`. Then a second
        GOAWAY names the last stream, so that no request in transit is lost. The connection is finished when the last
        stream is closed.

        The second ping follows the answer to the first. Streams that the peer had opened before it read the GOAWAY may
        come behind that answer: gRPC's C core writes answers to pings first.
        """
        if self.phase is _OPEN:
            self.phase = _DRAINING
            self.outgoing.append(frames.goaway(LARGEST, ErrorCode.NO_ERROR))
            self.outgoing.append(frames.frame(frames.PING, 0, 0, _DRAINING_PINGS[0]))

    def end_drain(self) -> None:
        """Names the last stream, if the connection is draining."""
        if self.phase is _DRAINING:
            self._final = self.last_stream
            self.outgoing.append(frames.goaway(self._final, ErrorCode.NO_ERROR))
            self.phase = _DRAINED if self._streams else _FINISHED

    def terminate(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> list[Event]:
        if self.phase is not _FINISHED:
            self._fail(ConnectionFault(code, reason))
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # Parsing.

    def _take_preface(self, data: bytes) -> bool:
        """Whether the preface is complete. If so, the server's first frames are in the output buffer."""
        if not data.startswith(frames.PREFACE[: len(data)]):
            self.phase = _FINISHED
            self._events.append(ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "not an HTTP/2 connection preface"))
            return False
        if len(data) < len(frames.PREFACE):
            self._rest = data
            return False
        limits = self._limits
        ours = {Setting.MAX_CONCURRENT_STREAMS: limits.streams, Setting.MAX_HEADER_LIST_SIZE: limits.header_bytes}
        self.outgoing.append(frames.settings(ours))
        self._receiving.open()
        return True

    def _take_frames(self, data: bytes, at: int) -> None:
        self.begun = True
        start, end = at, len(data)
        while end - at >= FRAME_HEADER_BYTES:
            size, flags, number = _unpack(data, at)
            kind = size & 0xFF
            size >>= 8
            if size > FRAME_BYTES:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            stop = at + FRAME_HEADER_BYTES + size
            if stop > end:
                break
            if self._work <= 0:
                self.pending = True
                break
            self._work -= 1 + (size >> 10)
            payload = data[at + FRAME_HEADER_BYTES : stop]
            at = stop
            number &= LARGEST
            if self._block is not None or self.phase < _OPEN:
                self._check_expected(kind, number)
            try:
                if kind == HEADERS and flags & _HEADERS_FLAGS == END_HEADERS:
                    self._on_block(flags, number, payload)
                else:
                    self._ON_FRAME[kind](self, flags, number, payload)
            except StreamFault as fault:
                self._reset_faulty(number, fault.code)
        if at > start and self._block is None:
            self.progress += 1
        self._rest = data[at:]

    def _check_expected(self, kind: int, number: int) -> None:
        if self.phase < _OPEN and kind != frames.SETTINGS:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if self._block is not None and (kind != CONTINUATION or number != self._block_stream):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a foreign frame inside a header block")

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        receiving = self._receiving
        receiving.size -= size
        if receiving.size < LOW_WINDOW:
            receiving.open()
        stream = self._streams.get(number)
        if stream is None or stream.ended:
            if number not in self._late:
                self._check_opened(number)
                raise StreamFault(ErrorCode.STREAM_CLOSED)
            return
        if size > _SMALL_DATA_BYTES:
            self._credit += 1 + (size >> 8)
        elif not flags & END_STREAM:
            self._work -= SMALL_DATA_WORK
        stream.receivable -= size
        if stream.receivable < 0:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR)
        if flags & frames.PADDED:
            payload = frames.strip_padding(payload, frames.PADDED)
        stream.delivered += len(payload)
        ended = stream.ended = flags & END_STREAM != 0
        if stream.content_length is not None:
            self._check_length(stream)
        self._events.append(DataReceived(stream, payload, ended))

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & (frames.PADDED | frames.PRIORITISED):
            payload = frames.strip_padding(payload, flags)
        if flags & END_HEADERS:
            self._on_block(flags, number, payload)
        else:
            self._block = bytearray(payload)
            self._block_flags, self._block_stream, self._block_cost = flags, number, len(payload)

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._block += payload
        self._block_cost += len(payload) + CONTINUATION_BYTES
        if self._block_cost > self._limits.decoded_header_bytes + CONTINUATION_BYTES:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "headers far above the limit")
        if flags & END_HEADERS:
            block, self._block = bytes(self._block), None
            self._on_block(self._block_flags, number, block)

    def _on_block(self, flags: int, number: int, block: bytes) -> None:
        if number <= self.last_stream or not number & 1:
            self._on_trailers(flags, number, block)
            return
        if number - self.last_stream > 2:  # noqa: PLR2004  a number was skipped
            self._skipped.append(range(self.last_stream + 1, number))
        self.last_stream = number
        headers, work = self._known_blocks.get(block), REQUEST_WORK
        if headers is None:
            headers = self._headers.request(block)
            work += self._count_decoded()
            if headers is None:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR)
        if self.phase >= _DRAINED or len(self._streams) >= self._limits.streams:
            raise StreamFault(ErrorCode.REFUSED_STREAM)
        self._work -= REQUEST_WORK
        ended = flags & END_STREAM != 0
        stream = Stream(number, headers.content_length, self._sending.stream_size, ended, work)
        if headers.content_length is not None:
            self._check_length(stream)
        self._streams[number] = stream
        self._events.append(RequestReceived(stream, headers, ended))

    def _on_trailers(self, flags: int, number: int, block: bytes) -> None:
        stream = self._streams.get(number)
        if stream is None and number not in self._late:
            closed = number & 1 and not any(number in skipped for skipped in self._skipped)
            code = ErrorCode.STREAM_CLOSED if closed else ErrorCode.PROTOCOL_ERROR
            raise ConnectionFault(code, "not a new client stream ID")
        well_formed = self._headers.trailers(block)
        self._count_decoded()
        if stream is None:
            return
        if stream.ended:
            raise StreamFault(ErrorCode.STREAM_CLOSED)
        if not well_formed or not flags & END_STREAM:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR)
        stream.ended = True
        if stream.content_length is not None:
            self._check_length(stream)
        self._events.append(DataReceived(stream, b"", ended=True))

    def _count_decoded(self) -> int:
        work, self._headers.work = self._headers.work, 0
        self._work -= work
        return work

    def _on_priority(self, _: int, number: int, payload: bytes) -> None:
        """Checks the frame, which has no effect since RFC 9113 (section 5.3.2)."""
        if not number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        # A stream that was never opened cannot be reset.
        if len(payload) != frames.PRIORITY_BYTES and number & 1 and number <= self.last_stream:
            raise StreamFault(ErrorCode.FRAME_SIZE_ERROR)

    def _on_rst_stream(self, _: int, number: int, payload: bytes) -> None:
        code = frames.read_number(payload)
        self._check_opened(number)
        stream = self._streams.get(number)
        if stream is not None:
            self._work -= RESET_WORK
            self._close(stream)
            self._events.append(StreamReset(stream, code))

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS with ACK and a payload")
            return
        count = len(payload) // frames.SETTING_BYTES
        if count > self._limits.settings:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"{count} settings in a frame")
        values = frames.read_settings(payload)
        self._work -= count
        if values.get(Setting.HEADER_TABLE_SIZE, DEFAULT_TABLE_BYTES) < DEFAULT_TABLE_BYTES:
            self._resize_table = True
        window = values.get(Setting.INITIAL_WINDOW_SIZE)
        if window is not None:
            self._work -= len(self._streams)
            self._resume_streams(self._sending.resize_streams(window, self.streams))
        self.outgoing.append(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self.phase = max(self.phase, _OPEN)

    def _on_push_promise(self, _: int, __: int, ___: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != frames.PING_BYTES:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a PING that is not 8 bytes")
        if not flags & frames.ACK:
            # Sent after the replies to earlier frames: clients take a ping's answer as an answer to all of those.
            self.pongs.append(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif self.phase >= _DRAINING and payload == _DRAINING_PINGS[0]:
            self.outgoing.append(frames.frame(frames.PING, 0, 0, _DRAINING_PINGS[1]))
        elif payload == _DRAINING_PINGS[1]:
            self.end_drain()

    def _on_goaway(self, _: int, number: int, payload: bytes) -> None:
        """Checks the frame. The peer closes the connection once its requests are answered."""
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < frames.GOAWAY_BYTES:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a truncated GOAWAY")

    def _on_window_update(self, _: int, number: int, payload: bytes) -> None:
        size = frames.read_number(payload) & LARGEST
        self._work -= WINDOW_WORK
        sending = self._sending
        if not number:
            done = sending.grow(size)
        elif (stream := self._streams.get(number)) is not None:
            done = sending.grow_stream(stream, size)
        else:
            self._check_opened(number)
            return
        if sending.drained_frames:
            self._resume_streams(done)

    def _on_unknown(self, _: int, __: int, ___: bytes) -> None:
        """Ignores a frame of another type (section 5.5)."""

    # Functions: bound methods would form a reference cycle with the connection.
    _ON_FRAME: ClassVar[tuple[Callable[[H2Connection, int, int, bytes], None], ...]] = (
        _on_data,
        _on_headers,
        _on_priority,
        _on_rst_stream,
        _on_settings,
        _on_push_promise,
        _on_ping,
        _on_goaway,
        _on_window_update,
        _on_continuation,
        *[_on_unknown] * (_FRAME_TYPES - CONTINUATION - 1),
    )

    # Streams.

    def _check_opened(self, number: int) -> None:
        if not number or number > self.last_stream or not number & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a frame on a stream that was never opened")

    def _check_length(self, stream: Stream) -> None:
        """Raises a fault if a body is longer than announced, or ends too early (section 8.1.1)."""
        missing = (stream.content_length or 0) - stream.delivered
        if missing < 0 or (missing and stream.ended):
            raise StreamFault(ErrorCode.PROTOCOL_ERROR)

    def _resume_streams(self, streams: list[Stream]) -> None:
        """Continues streams whose held-back data has been sent, and accounts for it."""
        sending = self._sending
        self._work -= sending.drained_frames
        self._credit += sending.drained_bytes >> 8
        sending.drained_frames = sending.drained_bytes = 0
        for stream in streams:
            if stream.trailers is not None:
                self._end(stream, stream.trailers)
            else:
                self._events.append(DataSent(stream))
        if sending.ready:
            self.pending = True

    def _header_frames(self, flags: int, number: int, block: bytes) -> bytes:
        """Frames of a large header block, or of the first one after the peer has asked for a smaller table."""
        if self._resize_table:
            block, self._resize_table = RESIZED_TABLE + block, False
        return frames.header_frames(flags, number, block)

    def _end(self, stream: Stream, trailers: bytes) -> None:
        number = stream.number
        if len(trailers) > FRAME_BYTES or self._resize_table:
            self.outgoing.append(self._header_frames(END_STREAM, number, trailers))
        else:
            self.outgoing += (_pack(len(trailers) << 8 | HEADERS, END_HEADERS | END_STREAM, number), trailers)
        if not stream.ended:
            self._late.append(number)
            self.outgoing.append(frames.rst_stream(number, ErrorCode.NO_ERROR))
        if stream.context is not None:
            self._credit += stream.work
            stream.context = None  # it may refer to the stream: without a cycle both are freed at once
        self._close(stream)

    def _reset_faulty(self, number: int, code: ErrorCode) -> None:
        stream = self._streams.get(number)
        if stream is None:
            self._late.append(number)
            self.outgoing.append(frames.rst_stream(number, code))
        else:
            self.reset(stream, code)
            self._events.append(StreamReset(stream, code))

    def _close(self, stream: Stream) -> None:
        del self._streams[stream.number]
        stream.closed = True
        if stream.unsent is not None:
            self._sending.forget(stream)
        if stream.granted or stream.wanted:
            self._receiving.forget(stream)
        if self.phase is _DRAINED and not self._streams:
            self.phase = _FINISHED

    def _fail(self, fault: ConnectionFault) -> None:
        if fault.code == ErrorCode.ENHANCE_YOUR_CALM:
            self._credit = min(self._credit, 0)
        last = self._final if self.phase >= _DRAINED else self.last_stream
        for stream in self.streams:
            self._close(stream)
            self._events.append(StreamReset(stream, fault.code))
        self.outgoing.append(frames.goaway(last, fault.code, fault.reason))
        self._events.append(ConnectionFailed(fault.code, fault.reason))
        self.phase, self.pending, self.overdrawn = _FINISHED, False, False
