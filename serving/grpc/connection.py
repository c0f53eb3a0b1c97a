"""One connection of a gRPC port: HTTP/2 over an asyncio transport, and the timers that end what takes too long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

from serving.grpc.h2 import DataReceived, DataSent, ErrorCode, H2Connection, RequestReceived, StreamReset
from serving.net.farewell import Farewell, unsent_bytes
from serving.net.peers import peer_of
from serving.net.ports import lifetime_s
from serving.unawaited import guarded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from serving.grpc.h2 import Event, Headers, Limits, Stream
    from serving.net.buffers import BufferBudget
    from serving.net.peers import PeerDebts
    from serving.net.turns import TurnQueue
    from serving.settings import Settings

_HEARING_S = 20.0
"""How long a client may take to hear that its connection is too old, as gRPC's own servers have it. Once the server
ends, the port says how long."""

_FREE_BYTES = 1 << 16
"""What a connection may hold beside the budget, so that small messages are read while that is spent."""

_TAKEN_BYTES = 4096
"""A client that takes so much of its reply in the time for a body is slow; one that takes less is gone."""

_CALL_S = 0.0001
"""What a call takes that has begun, about: those of one client wait for their turn, and not others behind them."""

_LINGER_S = 1.0
"""How long what a refused client still sends is read and thrown away, so that it can read the refusal."""


class Application(Protocol):
    """What the connections of one port share, and what answers their streams.

    Attributes:
        budget: What they may hold.
        turns: For what they have sent beyond one turn's work.
        debts: What their peers have used up on connections before.
        ending: Whether the server ends.
    """

    budget: BufferBudget
    turns: TurnQueue
    debts: PeerDebts
    settings: Settings
    limits: Limits
    connections: set[GrpcConnection]
    ending: bool

    def open(self, connection: GrpcConnection, stream: Stream, headers: Headers) -> StreamHandler | None:
        """What handles a new stream; None if it has been answered."""


class StreamHandler(Protocol):
    """What handles one stream.

    Attributes:
        idle: Whether the client need not send anything now: it is between two messages.
        waited_s: How long the client has kept the server waiting, for its request or for its window.
        unsent: Bytes that its window held back when that wait began.
    """

    stream: Stream
    idle: bool
    waited_s: float
    unsent: int

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

    def too_slow(self) -> None:
        """The client did not finish its request in time."""


class GrpcConnection(asyncio.Protocol):
    """One connection; what methods of `h2` leave to be sent goes out with `flush`.

    Attributes:
        share: What it holds of messages on their way or worked on, and of unread replies.
    """

    h2: H2Connection
    _transport: asyncio.Transport
    _peer: str

    def __init__(self, application: Application) -> None:
        self.share = application.budget.share(_FREE_BYTES)
        self._application = application
        self.loop = asyncio.get_running_loop()
        self._behind = b""
        self._waiting = self._paused = self._closing = self._turn_is_due = False
        self._farewell: Farewell | None = None
        self._ending = application.ending
        self._paused_s = self._stalled_s = 0.0
        self._progress = self._buffered = self._unread = 0
        self._draining_s: float | None = None
        self._lifetime_s = lifetime_s(application.settings)
        self._idle_since = self.loop.time()
        self._idle_after = 0

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Waits for the preface; over TLS, ends what has not agreed on HTTP/2 (RFC 9113, 3.2)."""
        self._transport = cast("asyncio.Transport", transport)
        address = transport.get_extra_info("peername")
        self._peer = peer_of(address[0]) if address else ""
        credit, wait_s = self._application.debts.begin(self._peer)
        self.h2 = H2Connection(self._application.limits, credit)
        if wait_s:
            self._waiting = True
            self.loop.call_later(wait_s, guarded, self.abort, self._stop_waiting)
        self._application.connections.add(self)
        secured = transport.get_extra_info("ssl_object")
        if secured is not None and secured.selected_alpn_protocol() != "h2":
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  how it ended does not matter
        """Cancels the calls under way: their client has gone."""
        self._end_credit()
        if self._farewell is not None:
            self._farewell.cancel()
        self._application.connections.discard(self)
        self._handle(self.h2.terminate())
        self.share.close()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            if self._farewell is not None:
                self._farewell.received(len(data))
            return
        if self.h2.pending or self.h2.overdrawn or self._waiting:
            # What came before waits for its turn, or has taken the time of others: nothing more is read meanwhile.
            self._behind += data
            self._transport.pause_reading()
            if not self._waiting:
                self._take_rest_next_turn()
            return
        self._handle(self.h2.receive(data))
        self.flush()
        if self.h2.pending:
            self._take_rest_next_turn()

    def _stop_waiting(self) -> None:
        """Reads what has come while the peer's debts made this connection wait."""
        self._waiting = False
        if self._closing or self._transport.is_closing():
            return
        data, self._behind = self._behind, b""
        self.data_received(data)
        if not self.h2.pending:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The client does not read: it is not read either, until it does or the tick ends it."""
        self._paused, self._paused_s = True, 0.0
        self._buffered = self._unread = self._transport.get_write_buffer_size()
        self.h2.pause()
        self._transport.pause_reading()
        if not self.share.take(self._unread):
            self._unread = 0
            self._transport.abort()

    def resume_writing(self) -> None:
        self._paused = False
        self.share.give(self._unread)
        self._handle(self.h2.resume())
        self.flush()
        if self.h2.pending or self._behind:
            self._take_rest_next_turn()
        else:
            self._transport.resume_reading()

    def _take_rest_next_turn(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self._application.turns.add(self._take_rest)

    def _take_rest(self) -> float:
        """Goes on with what waits; returns about how many seconds the calls take that it has begun."""
        self._turn_is_due = False
        if self._paused or not (self.h2.pending or self._behind) or self._transport.is_closing():
            return 0.0
        before = self.h2.last_stream
        guarded(self.abort, self._go_on)
        return _CALL_S * (self.h2.last_stream - before) / 2  # clients use odd numbers alone

    def _go_on(self) -> None:
        data, self._behind = self._behind, b""
        self._handle(self.h2.receive(data))
        self.flush()
        if self.h2.pending:
            self._take_rest_next_turn()
        elif not self._closing:
            self._transport.resume_reading()

    def _handle(self, events: Iterable[Event]) -> None:
        for event in events:
            # An event may be of a stream that was answered, or given up, since it happened.
            if type(event) is DataReceived:
                if not event.stream.closed:
                    event.stream.context.received(event.data, ended=event.ended)
            elif type(event) is RequestReceived:
                if not event.stream.closed:
                    handler = event.stream.context = self._application.open(self, event.stream, event.headers)
                    if handler is not None and event.ended:
                        handler.received(b"", ended=True)
            else:
                self._handle_end(event)
        if self._ending:
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
        if self._closing:
            return
        if data := self.h2.data_to_send():
            self._transport.write(data)
        if self.h2.finished:
            self._close()

    def tick(self, seconds: float) -> None:
        """Renews the credit and ends what has taken too long; called every so many seconds."""
        h2, settings = self.h2, self._application.settings
        self._renew(seconds)
        self._count_pause(seconds)
        self._count_idleness()
        if h2.progress != self._progress or (h2.greeted and not h2.partial):
            self._progress, self._stalled_s = h2.progress, 0.0
        self._stalled_s += seconds
        if h2.finished:
            return
        if (self._paused and self._paused_s > settings.body_timeout_s) or (
            not h2.greeted and self._stalled_s > settings.header_timeout_s
        ):
            self._transport.abort()
            return
        if h2.partial and self._stalled_s > settings.body_timeout_s:
            self._handle(h2.terminate(ErrorCode.PROTOCOL_ERROR, "a frame or header block that does not end"))
        for handler in self._handlers():
            self._check_pace(handler, seconds)
        self._lifetime_s -= seconds
        if self._draining_s is not None:
            self._draining_s += seconds
            if self._draining_s > _HEARING_S and not self._application.ending:
                h2.finish_shutdown()
        elif self._lifetime_s <= 0 and h2.greeted:
            self._begin_shutdown()
        self.flush()

    def _renew(self, seconds: float) -> None:
        self._handle(self.h2.renew(seconds))
        if self.h2.pending:
            self._take_rest_next_turn()

    def drain(self) -> None:
        """The server ends: sends the client away, and takes what it sends before it has heard of that.

        However long that takes: what has not come yet may be on its way, or wait in the system for this process.
        """
        if not self.h2.finished:
            self._ending = True
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
            self._ending = False
            for handler in self._handlers():
                handler.draining()

    def _count_idleness(self) -> None:
        if self.h2.streams or self.h2.last_stream != self._idle_after:
            self._idle_since, self._idle_after = self.loop.time(), self.h2.last_stream

    def idleness(self) -> tuple[bool, float] | None:
        """Whether there was ever a call, and since when there is none, give or take a tick; None where there is one."""
        if self._closing or self.h2.streams or self.h2.last_stream != self._idle_after:
            return None
        return self.h2.last_stream > 0, self._idle_since

    def give_way(self) -> None:
        """Ends an idle connection at once, for another one, unless its client has not received all that was said."""
        has_all = not unsent_bytes(self._transport)
        self.end("another connection needs its place")
        if has_all:
            self._transport.close()

    def abort(self) -> None:
        """Ends the connection at once: nobody can say anything on it any more."""
        self._transport.abort()

    def _begin_shutdown(self) -> None:
        if self._draining_s is None:
            self._draining_s = 0.0
            self.h2.begin_shutdown()

    def _handlers(self) -> list[StreamHandler]:
        return [stream.context for stream in self.h2.streams if stream.context is not None]

    def _check_pace(self, handler: StreamHandler, seconds: float) -> None:
        """Ends a stream whose client has kept the server waiting for too long."""
        stream = handler.stream
        if stream.closed or (stream.unsent is None and (stream.ended or stream.wanted or handler.idle)):
            return  # it waits for its answer or a grant, not for its client, or for nothing
        if stream.unsent is not None and (unsent := len(stream.unsent)) <= handler.unsent - _TAKEN_BYTES:
            handler.unsent, handler.waited_s = unsent, 0.0
        handler.waited_s += seconds
        if handler.waited_s <= self._application.settings.body_timeout_s:
            return
        if stream.unsent is None:
            handler.too_slow()
        else:
            self.h2.reset(stream, ErrorCode.CANCEL)
            stream.context = None
            handler.lost()

    def _count_pause(self, seconds: float) -> None:
        """Counts how long the network has taken nothing of what is written."""
        if self._paused:
            buffered = self._transport.get_write_buffer_size()
            if buffered <= self._buffered - _TAKEN_BYTES:
                self._buffered, self._paused_s = buffered, 0.0
            self._paused_s += seconds

    def _end_credit(self) -> None:
        """The connection is over, and its peer owes what it has used up."""
        if not self._closing:
            self._closing = True
            self._application.debts.charge(self._peer, self.h2.spent)

    def _close(self) -> None:
        """Says no more, and listens a moment longer, so that what was said is read."""
        self._end_credit()
        if self._transport.is_closing():
            return
        if self.h2.begun:
            pace_s = self._application.settings.body_timeout_s
            self._farewell = Farewell(self._transport, quiet_s=_LINGER_S, pace_s=pace_s)
        else:
            self._transport.close()  # there is nothing to say in another protocol
