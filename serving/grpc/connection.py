"""One connection of a gRPC port: HTTP/2 on a connection, and what ends streams that take too long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from serving.grpc.h2 import DataReceived, DataSent, ErrorCode, H2Connection, Limits, RequestReceived, StreamReset
from serving.net.connection import Connection, Port
from serving.net.connection_limiter import PeerDebts, peer_of
from serving.net.lingering_close import unsent_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from serving.grpc.h2 import Event, Headers, Stream
    from serving.net.buffers import BufferBudget
    from serving.net.observer import RequestObserver
    from serving.net.orca import LoadReports
    from serving.net.requests import RecordError
    from serving.security.keys import ApiKeys
    from serving.settings import Settings

_HEARING_S = 20.0
"""How long a client may take to hear that its connection is too old, as gRPC's own servers have it. Once the server
ends, the port says how long."""

_FREE_BYTES = 1 << 16
"""What a connection may hold beside the budget, so that small messages are read while that is spent."""

_GRANTED_MESSAGES = 4
"""Messages of the largest size that a connection may be sending at a time; further ones wait for their turn."""

_CALL_S = 0.0001
"""What a call takes that has begun, about: those of one client wait for their turn, and not others behind them."""

_LINGER_S = 1.0
"""How long what a refused client still sends is read and thrown away, so that it can read the refusal."""


class GrpcPort(Port["GrpcConnection"]):
    """What the connections of one port share, and what answers their streams.

    Attributes:
        methods: By path.
        limits: Those of each connection.
        debts: What their peers have used up on connections before.
        keys: What all but the open methods need one of; None where there are none.
        observer: Is told of requests that have ended; None where nobody listens.
        load_reports: What balancers are told of the load behind a reply; None where nothing is.
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
        load_reports: LoadReports | None = None,
    ) -> None:
        super().__init__(settings, budget)
        self.methods = methods
        self.record_error, self.keys, self.observer, self.load_reports = record_error, keys, observer, load_reports
        self.large_body_lock = asyncio.Lock()
        self.limits = limits = Limits(
            header_bytes=settings.header_limit_bytes,
            header_fields=settings.header_limit_count,
            granted_bytes=_GRANTED_MESSAGES * settings.body_limit_bytes,
        )
        self.debts = PeerDebts(limits.credit, limits.credit_per_s)

    def open(self, connection: GrpcConnection, stream: Stream, headers: Headers) -> StreamHandler | None:
        """What handles a new stream; None if it has been answered."""
        raise NotImplementedError


class StreamHandler(Protocol):
    """What handles one stream."""

    def received(self, data: bytes, *, ended: bool) -> None:
        """The client sent data, or its end."""

    def sent(self) -> None:
        """The client has taken what was held back."""

    def lost(self) -> None:
        """Nobody waits for this stream any more."""

    def draining(self) -> None:
        """The server ends: what waits for nothing but its client must end too."""

    def keys_changed(self) -> None:
        """The API keys are others now."""

    def tick(self, seconds: float) -> None:
        """Ends the stream where its client has kept the server waiting for too long."""


class GrpcConnection(Connection[GrpcPort]):
    """One connection; what methods of `h2` leave to be sent goes out with `flush`."""

    __slots__ = (
        *("_draining_s", "_idle_after", "_is_draining", "_peer", "_progress", "_stalled_s", "_unsent", "h2"),
        "_waits",
    )

    h2: H2Connection

    def __init__(self, port: GrpcPort) -> None:
        super().__init__(port, _FREE_BYTES)
        self._waits = False  # for the debts of its peer
        self._is_draining = port.ending
        self._draining_s: float | None = None
        self._stalled_s = 0.0
        self._progress = self._unsent = self._idle_after = 0

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Waits for the preface; over TLS, ends what has not agreed on HTTP/2 (RFC 9113, 3.2)."""
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
        """Reads what has come while the peer's debts made this connection wait."""
        self._waits = False
        self._read_on_next_turn()

    def pause_writing(self) -> None:
        """The client is not read either, until it reads."""
        super().pause_writing()
        self._unsent = self._transport.get_write_buffer_size()
        self.h2.pause()
        self._pause()
        if not self.share.take(self._unsent):
            self._unsent = 0
            self.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.share.give(self._unsent)
        self._handle(self.h2.resume())
        self.flush()
        self._read_on_next_turn()

    # What is received.

    def receive(self, data: bytes) -> None:
        """Has HTTP/2 read it; what is beyond a turn's work, or what comes behind too much of it, waits for another."""
        h2 = self.h2
        self._handle(h2.receive(data))
        if h2.outgoing or h2.pongs or h2.finished:
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
        if not (self._paused or self._ending):
            self._resume()

    def _take_turn(self) -> float:
        before = self.h2.last_stream
        super()._take_turn()
        return _CALL_S * (self.h2.last_stream - before) / 2  # clients use odd numbers alone

    def _handle(self, events: Iterable[Event]) -> None:
        for event in events:
            # An event may be of a stream that was answered, or given up, since it happened.
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
        if self._is_draining:
            self._take_leave()

    def _handle_end(self, event: Event) -> None:
        """Of a stream whose client has taken all or gives up; that of the connection follows from what is sent."""
        if isinstance(event, StreamReset):
            handler, event.stream.context = event.stream.context, None
            if handler is not None:
                handler.lost()
        elif isinstance(event, DataSent) and not event.stream.closed:
            event.stream.context.sent()

    # What the port and the handlers of streams call.

    def flush(self) -> None:
        if self._ending:
            return
        if data := self.h2.data_to_send():
            self._transport.write(data)
        if self.h2.finished:
            self._close()

    def tick(self, seconds: float) -> None:
        """Renews the credit and ends streams that have taken too long, too."""
        h2, settings = self.h2, self.port.settings
        self._handle(h2.renew(seconds))
        if h2.pending:
            self._pause()
            self._read_on_next_turn()
        self._count_idleness()
        if h2.progress != self._progress or (h2.greeted and not h2.partial):
            self._progress, self._stalled_s = h2.progress, 0.0
        self._stalled_s += seconds
        if h2.finished:
            return
        super().tick(seconds)
        if not h2.greeted and self._stalled_s > settings.header_timeout_s:
            self.abort()
            return
        if h2.partial and self._stalled_s > settings.body_timeout_s:
            self._handle(h2.terminate(ErrorCode.PROTOCOL_ERROR, "a frame or header block that does not end"))
        for handler in self._handlers():
            handler.tick(seconds)
        if self._draining_s is not None:
            self._draining_s += seconds
            if self._draining_s > _HEARING_S and not self.port.ending:
                h2.finish_shutdown()
        elif self._lifetime_s <= 0 and h2.greeted:
            self._begin_shutdown()
        self.flush()

    def drain(self) -> None:
        """The server ends: sends the client away, and takes what it sends before it has heard of that.

        However long that takes: what has not come yet may be on its way, or wait in the system for this process.
        """
        if not (self.h2.finished or self.h2.refusing):
            self._is_draining = True
            self._take_leave()
            self.flush()

    def refuse_more(self) -> None:
        """The time to drain is over: names the last stream, whether or not the client has heard of the end."""
        if self.h2.greeted and not self.h2.finished:
            self._begin_shutdown()
            self.h2.finish_shutdown()
            self._take_leave()
            self.flush()

    def keys_changed(self) -> None:
        """Reads all headers anew from now on, and asks the calls that are there."""
        self.h2.forget_headers()
        for handler in self._handlers():
            handler.keys_changed()

    def end(self, reason: str = "the server ends") -> None:
        self._handle(self.h2.terminate(reason=reason))
        self.flush()

    def _take_leave(self) -> None:
        """The next step of the end: the client is told, and once it has heard, calls without an end are ended."""
        if not self.h2.greeted:
            return
        self._begin_shutdown()
        if self.h2.refusing:
            self._is_draining = False
            for handler in self._handlers():
                handler.draining()

    def _count_idleness(self) -> None:
        last = self.h2.last_stream
        if self.h2.streams or last != self._idle_after:
            self._idle_since, self._idle_after, self._used = self.loop.time(), last, last > 0

    def idle_since(self) -> tuple[bool, float] | None:
        """Give or take a tick."""
        is_busy = self.h2.streams or self.h2.last_stream != self._idle_after
        return None if is_busy else super().idle_since()

    def close_if_idle(self) -> None:
        """Ends an idle connection at once, for another one, unless its client has not received all that was said."""
        has_all = not unsent_bytes(self._transport)
        self.end("another connection needs its place")
        if has_all:
            self._transport.close()

    def _begin_shutdown(self) -> None:
        if self._draining_s is None:
            self._draining_s = 0.0
            self.h2.begin_shutdown()

    def _handlers(self) -> list[StreamHandler]:
        return [stream.context for stream in self.h2.streams if stream.context is not None]

    def _end_credit(self) -> None:
        """The connection is over, and its peer owes what it has used up."""
        if not self._ending:
            self._ending = True
            self.port.debts.charge(self._peer, self.h2.spent)

    def _close(self) -> None:
        """Says no more, and listens a moment longer, so that what was said is read."""
        self._end_credit()
        if self.h2.begun:
            self.linger(_LINGER_S)
        else:
            self._transport.close()  # there is nothing to say in another protocol
