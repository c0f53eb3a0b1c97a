"""One connection of a gRPC port: HTTP/2 over the transport, and time limits of its streams."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from bertserve.serving.grpc.h2 import (
    DataReceived,
    DataSent,
    ErrorCode,
    H2Connection,
    H2Phase,
    Limits,
    RequestReceived,
    StreamReset,
)
from bertserve.serving.net.connection import Connection, Phase, Port
from bertserve.serving.net.connection_limiter import PeerDebts, peer_of
from bertserve.serving.net.lingering_close import unsent_bytes
from bertserve.serving.net.observer import RequestObserver
from bertserve.serving.net.requests import MAX_HEADER_BYTES, MAX_HEADERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bertserve.serving.grpc.h2 import Event, Headers, Stream
    from bertserve.serving.net.buffers import BufferBudget
    from bertserve.serving.net.requests import RecordError
    from bertserve.serving.security.keys import ApiKeys
    from bertserve.serving.settings import Settings

_DRAIN_S = 20.0
"""Maximum drain of a connection that has reached its maximum age, as in gRPC's own servers. During shutdown the port
decides instead."""

_FREE_BYTES = 1 << 16
"""Bytes that a connection may hold outside the budget, so that small messages are read while the budget is used up."""

_GRANTED_MESSAGES = 4
"""Messages of maximum size that a connection may send at a time. Further ones wait for their turn."""

_CALL_S = 0.0001
"""Approximate CPU time of starting a call. Calls of one client wait for their turn, and do not delay other clients."""

_LINGER_S = 1.0
"""How long data from a refused client is read and discarded, so that the client can read the refusal."""

_FINISHED = H2Phase.FINISHED


class GrpcPort(Port["GrpcConnection"]):
    """State that the connections of one port share. `open` creates the handlers of their streams.

    Attributes:
        debts: The credit that peers used up on earlier connections.
        keys: All methods that are not open need one of these; None if there are none.
        large_body_lock: Held by the call whose message is being decompressed.
    """

    def __init__(
        self,
        methods: Mapping[str, Any],
        settings: Settings,
        record_error: RecordError,
        budget: BufferBudget,
        keys: ApiKeys | None = None,
        observer: RequestObserver | None = None,
    ) -> None:
        super().__init__(settings, budget)
        self.methods = methods
        self.record_error, self.keys = record_error, keys
        self.observer = observer or RequestObserver(lambda *_: None, ())
        self.large_body_lock = asyncio.Lock()
        self.limits = limits = Limits(
            header_bytes=MAX_HEADER_BYTES,
            header_fields=MAX_HEADERS,
            granted_bytes=_GRANTED_MESSAGES * settings.body_limit_bytes,
        )
        self.debts = PeerDebts(limits.credit, limits.credit_per_s)

    def open(self, connection: GrpcConnection, stream: Stream, headers: Headers) -> StreamHandler | None:
        """The handler of a new stream; None if it has already been answered."""
        raise NotImplementedError


class StreamHandler(Protocol):
    """The handler of one stream."""

    def received(self, data: bytes, *, ended: bool) -> None:
        """The client sent data, or ended its side."""

    def sent(self) -> None:
        """All held-back data has been sent."""

    def lost(self) -> None:
        """The stream is gone, and nobody waits for an answer."""

    def drain(self) -> None:
        """The server is shutting down. A stream that waits only for its client must end too."""

    def keys_changed(self) -> None:
        """The API keys have changed."""

    def tick(self, seconds: float) -> None:
        """Ends the stream if its client has kept the server waiting for too long."""


class GrpcConnection(Connection[GrpcPort]):
    """One connection. `flush` sends what methods of `h2` leave in its output buffer.

    The phase of `h2` is that of the connection.
    """

    __slots__ = (
        *("_drain_s", "_has_to_drain", "_idle_after", "_peer", "_progress", "_stalled_s", "_unsent", "_waits"),
        "h2",
    )

    h2: H2Connection

    def __init__(self, port: GrpcPort) -> None:
        super().__init__(port, _FREE_BYTES)
        self._waits = False  # because of its peer's debts
        self._has_to_drain = port.ending  # together with its calls, which have not been told yet
        self._drain_s = self._stalled_s = 0.0
        self._progress = self._unsent = self._idle_after = 0

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Waits for the preface. Closes a TLS connection that has not negotiated HTTP/2 (RFC 9113, 3.2)."""
        super().connection_made(transport)
        address = transport.get_extra_info("peername")
        self._peer = peer_of(address[0]) if address else ""
        credit, wait_s = self.port.debts.begin(self._peer)
        self.h2 = H2Connection(self.port.limits, credit)
        if wait_s:
            self._waits = True
            self._pause()
            self.loop.call_later(wait_s, self._stop_waiting)
        secured = transport.get_extra_info("ssl_object")
        if secured is not None and secured.selected_alpn_protocol() != "h2":
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_credit()
        self._handle(self.h2.terminate())
        super().connection_lost(exc)

    def _stop_waiting(self) -> None:
        """Reads what arrived while the peer's debts delayed this connection."""
        self._waits = False
        self._read_on_next_turn()

    def pause_writing(self) -> None:
        """Stops reading from the client until it reads again."""
        super().pause_writing()
        self._unsent = self._transport.get_write_buffer_size()
        self.h2.pause()
        self._pause()
        if self.share.is_exceeded:
            self._unsent = 0  # part of the only reply, which is counted as a whole
        elif not self.share.take(self._unsent):
            self._unsent = 0
            self.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.share.give(self._unsent)
        self._handle(self.h2.resume())
        self.flush()
        self._read_on_next_turn()

    # Receiving.

    def receive(self, data: bytes) -> None:
        """Passes data to HTTP/2. Work beyond the limit of a turn waits for another turn."""
        h2 = self.h2
        self._handle(h2.receive(data))
        if h2.outgoing or h2.pongs or h2.phase is _FINISHED:
            self.flush()
        if h2.pending or h2.overdrawn:
            self._pause()
            self._read_on_next_turn()

    def read_on(self) -> None:
        if self._waits or self._sending is not None:
            return
        data, self._rest = bytes(self._rest), b""
        self._paused = False
        self.receive(data)
        if not (self._paused or self._phase >= Phase.LAST):
            self._resume()

    def _take_turn(self) -> float:
        before = self.h2.last_stream
        super()._take_turn()
        return _CALL_S * (self.h2.last_stream - before) / 2  # clients use only odd numbers

    def _handle(self, events: Iterable[Event]) -> None:
        for event in events:
            # Since the event, its stream may have been answered or reset.
            if type(event) is DataReceived:
                if not event.stream.closed:
                    event.stream.context.received(event.data, ended=event.ended)
            elif type(event) is RequestReceived:
                if not event.stream.closed:
                    handler = event.stream.context = self.port.open(self, event.stream, event.headers)
                    if handler is not None and event.ended:
                        handler.received(b"", ended=True)
            else:
                self._handle_end(event)
        if self._has_to_drain:
            self._continue_drain()

    def _handle_end(self, event: Event) -> None:
        """Handles the end of a stream, or of its held-back data. A failed connection is closed by `flush`."""
        if isinstance(event, StreamReset):
            handler, event.stream.context = event.stream.context, None
            if handler is not None:
                handler.lost()
        elif isinstance(event, DataSent) and not event.stream.closed:
            event.stream.context.sent()

    # Called by the port and by stream handlers.

    def flush(self) -> None:
        if self._phase >= Phase.LAST:
            return
        if data := self.h2.data_to_send():
            self._transport.write(data)
        if self.h2.phase is _FINISHED:
            self._close()

    def tick(self, seconds: float) -> None:
        """Also renews the credit, and ends streams that have taken too long."""
        h2, port = self.h2, self.port
        self._handle(h2.renew(seconds))
        if h2.pending:
            self._pause()
            self._read_on_next_turn()
        self._count_idleness()
        if h2.progress != self._progress or (h2.phase is not H2Phase.GREETING and not h2.partial):
            self._progress, self._stalled_s = h2.progress, 0.0
        self._stalled_s += seconds
        if h2.phase is _FINISHED:
            return
        super().tick(seconds)
        if h2.phase is H2Phase.GREETING and self._stalled_s > port.header_timeout_s:
            self.abort()
            return
        if h2.partial and self._stalled_s > port.body_timeout_s:
            self._handle(h2.terminate(ErrorCode.PROTOCOL_ERROR, "a frame or header block that does not end"))
        for handler in self._handlers():
            handler.tick(seconds)
        if h2.phase is H2Phase.DRAINING:
            self._drain_s += seconds
            if self._drain_s > _DRAIN_S and not port.ending:
                h2.end_drain()
        elif self._lifetime_s <= 0:
            h2.begin_drain()
        self.flush()

    def drain(self) -> None:
        """Starts to drain: sends GOAWAY, and still accepts streams opened before the client knows of it.

        There is no time limit here: data may still be in transit, or in the kernel's buffer.
        """
        self._has_to_drain = True
        self._continue_drain()
        self.flush()

    def end_drain(self) -> None:
        """Names the last stream, whether or not the client has acknowledged the GOAWAY."""
        self.h2.begin_drain()
        self.h2.end_drain()
        self.drain()

    def keys_changed(self) -> None:
        """Drops cached headers, and lets open calls check their keys again."""
        self.h2.forget_headers()
        for handler in self._handlers():
            handler.keys_changed()

    def end(self, reason: str = "the server is shutting down") -> None:
        self._handle(self.h2.terminate(reason=reason))
        self.flush()

    def _continue_drain(self) -> None:
        """Sends the client a GOAWAY. Once it has acknowledged that, handlers end calls without an end of their own."""
        self.h2.begin_drain()
        if self.h2.phase >= H2Phase.DRAINED:
            self._has_to_drain = False
            for handler in self._handlers():
                handler.drain()

    def _count_idleness(self) -> None:
        last = self.h2.last_stream
        if self.h2.streams or last != self._idle_after:
            self._since, self._idle_after = self.loop.time(), last
            if last and self._phase is Phase.NEW:
                self._phase = Phase.IDLE

    def idle_since(self) -> tuple[bool, float] | None:
        """Accurate to one tick."""
        is_busy = self.h2.streams or self.h2.last_stream != self._idle_after
        return None if is_busy else super().idle_since()

    def close_if_idle(self) -> None:
        """Closes an idle connection to make room for another one, at once if everything was sent."""
        has_all = not unsent_bytes(self._transport)
        self.end("closed to make room for another connection")
        if has_all:
            self._transport.close()

    def _handlers(self) -> list[StreamHandler]:
        return [stream.context for stream in self.h2.streams if stream.context is not None]

    def _end_credit(self) -> None:
        """Marks the connection as over, and charges its peer for the credit it has used up."""
        if self._phase < Phase.LAST:
            self._phase = Phase.LAST
            self.port.debts.charge(self._peer, self.h2.spent)

    def _close(self) -> None:
        """Stops sending, and reads a moment longer so that the client can read what was sent."""
        self._end_credit()
        if self.h2.begun:
            self.linger(_LINGER_S)
        else:
            self._transport.close()  # the client speaks another protocol
