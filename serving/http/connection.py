"""An HTTP/1.1 connection: answers requests one after another and writes the replies.

A request that arrives in one piece, as nearly all do, sets no timer and needs no buffer space. Received bytes are
parsed in pieces, up to a limit per turn of the event loop. The rest queues behind the bytes of other connections. The
head and the body of a request must each arrive in time (408). Pipelined requests wait for the replies before theirs;
meanwhile the connection reads nothing and runs no timer. The end of a connection cancels its exchange, so that nothing
is computed for a client that has gone. If a client half-closes (FIN, or TLS's close_notify), complete requests are
answered first. An incomplete request is not answered.

A request is one task and one write. uvicorn's protocol, with its cycle, event and messages per request, was measured to
cost a third of the server's time for a short text.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from bertserve.serving.errors import BuffersFull, InternalError, SlowRequest
from bertserve.serving.http.http1 import Reading, RequestParser
from bertserve.serving.http.replies import head_lines, sends_body
from bertserve.serving.logs import fields
from bertserve.serving.net.buffers import FREE_BYTES
from bertserve.serving.net.connection import Connection
from bertserve.serving.net.lingering_close import unread_bytes, unsent_bytes
from bertserve.serving.security.tls import HalfOpen
from bertserve.serving.unawaited import guarded

if TYPE_CHECKING:
    from bertserve.serving.errors import BertserveError
    from bertserve.serving.http.exchange import HttpReply, HttpRequest
    from bertserve.serving.http.port import HttpPort

log = logging.getLogger("bertserve.http")

_LINGER_S = 5.0
"""Seconds for which input of a rejected client is discarded, so that the client can read the rejection."""

_QUICK_LINGER_S = 1.0
"""The same for a client that has fallen silent and has nothing left to send."""

_UNREAD_S = 0.01
"""Seconds until a timer fires again that found unread bytes, which arrived in time."""

_PIECE_BYTES = 2048
"""Bytes that are parsed between checks for waiting requests, as later requests wait for earlier ones."""

_TURN_BYTES = 32_768
"""Bytes that a connection parses per turn of the event loop; for a body of known length, all received bytes."""

_FRAMING_COST = 16
"""Weight of a byte of chunk framing in a turn: small chunks cost parsing time and carry little data."""

_ANSWER_S = 0.0002
"""Approximate time that the answer to a pipelined request takes in its turn, in seconds."""

_LOOK_S = 0.25
"""Seconds after a half-close until the first check for a client that awaits a reply. The interval doubles each time."""

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_KEPT = b"connection: keep-alive\r\n\r\n"
"""Ends the head of a reply to HTTP/1.0, whose clients expect a closed connection unless told otherwise."""


class HttpConnection(Connection["HttpPort[Any]"]):
    __slots__ = (
        *("_ahead", "_end_waits", "_ended", "_exchange", "_knows_interim", "_last_refusal", "_look", "_made_room"),
        *("_parser", "_reply_room", "_rest_room", "_timed", "_timer", "_told", "_writable"),
    )

    _PIECE_BYTES = _PIECE_BYTES
    _TAKEN_BYTES = FREE_BYTES

    def __init__(self, port: HttpPort[Any]) -> None:
        super().__init__(port)
        self._parser = RequestParser(port, self.share)
        self._timed = Reading.NOTHING
        self._timer: asyncio.TimerHandle | None = None
        self._ended = self._end_waits = False  # by the client
        self._knows_interim = True
        self._look: asyncio.TimerHandle | None = None
        self._rest_room = self._reply_room = self._made_room = 0
        self._told: HttpReply | None = None  # the reply that has been written
        self._last_refusal: tuple[HttpRequest, BertserveError] | None = None
        self._ahead: deque[tuple[HttpRequest, bool]] = deque()
        self._exchange: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport.set_write_buffer_limits(FREE_BYTES)
        secured = transport.get_extra_info("ssl_object")
        if isinstance(secured, HalfOpen):
            secured.on_end = partial(self.loop.call_soon, self.eof_received)
        self._set_timer(Reading.HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the current exchange, and drops references that would keep this object alive."""
        self._set_timer(Reading.NOTHING)
        if self._look is not None:
            self._look.cancel()
        secured = self._transport.get_extra_info("ssl_object")
        if isinstance(secured, HalfOpen):
            secured.on_end = None
        self._ahead.clear()
        if self._exchange is not None:
            self._exchange.cancel()
            self._exchange = None  # its CancelledError has a traceback that refers to this object
        self._parser.close()
        super().connection_lost(exc)

    def eof_received(self) -> bool:
        """Handles a half-close (RFC 9112, 9.6): answers complete requests, then ends the connection.

        Over TLS this may be called before earlier bytes have been parsed. It then takes effect after them.
        """
        plain = self._transport.can_write_eof()
        self._end_waits = self._paused
        if self._paused or self._transport.is_closing():
            return plain
        self._ended = True
        if self._exchange is None:
            self._transport.close()  # no reply is due
        elif self._knows_interim and plain:
            self._look = self.loop.call_later(_LOOK_S, guarded, self.abort, self._look_for_client, _LOOK_S)
        return plain

    def _look_for_client(self, waited_s: float) -> None:
        """Writes to a half-closed client that awaits a reply. A client that has gone answers with a reset.

        Clients ignore an interim reply. TLS needs no check, because a client that leaves ends TCP, too.
        """
        self._transport.write(_CONTINUE)
        later_s = 2 * waited_s
        self._look = self.loop.call_later(later_s, guarded, self.abort, self._look_for_client, later_s)

    def pause_writing(self) -> None:
        """Makes the reply wait, too."""
        super().pause_writing()
        self._writable.clear()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writable.set()
        self._reply_taken()

    def _reply_taken(self) -> None:
        if self._writable.is_set():
            self.share.give(self._reply_room)
            self._reply_room = 0

    # Reading and parsing.

    def read_on(self) -> None:
        """Parses up to the limit of a turn. The rest waits for the next turn, or until no request waits here."""
        if self._ahead:
            return
        self.share.give(self._rest_room)
        self._rest_room = 0
        parser, rest, at, left = self._parser, memoryview(self._rest), 0, _TURN_BYTES
        while at < len(rest) and left > 0 and not (self._ahead or self._ending):
            missing = parser.length - parser.body_bytes if parser.reading is Reading.BODY else 0
            piece = rest[at : at + max(_PIECE_BYTES, missing)]
            at += len(piece)
            framing = parser.framing_bytes
            self.receive(piece)
            left -= len(piece) + _FRAMING_COST * max(0, parser.framing_bytes - framing)
        self._rest = b"" if self._ending else rest[at:]
        if self._ending:
            return
        if self._ahead:
            self._keep_rest()
        elif self._rest or left <= 0:
            self._pause()
            self._read_on_next_turn()
        elif self._paused:
            self._resume()
            if parser.reading is not self._timed:
                self._time_reading()
            if self._end_waits:
                self.eof_received()

    def _keep_rest(self) -> None:
        """Reserves buffer space for unparsed bytes, which may wait long behind the waiting requests."""
        size = len(self._rest)
        self._rest = bytes(self._rest)
        if size <= FREE_BYTES:
            return
        if self.share.take(size):
            self._rest_room = size
        else:
            self._refuse(BuffersFull())

    def receive(self, data: bytes | memoryview) -> None:
        """Parses received bytes and starts to answer the requests in them."""
        parser = self._parser
        refusal = parser.feed(data)
        if parser.requests:
            if self._timer is not None:
                self._set_timer(Reading.NOTHING)
            self._ahead.extend(parser.requests)
            parser.requests.clear()
            if self._exchange is None:
                self._answer_next(ahead=False)
        elif self._idle_since is not None and parser.reading is not Reading.NOTHING:
            self._idle_since = None
        if refusal is not None:
            self._refuse(refusal)
        elif parser.over:
            self._ending = True
        elif self._ahead:
            self._pause()
            self._set_timer(Reading.NOTHING)
        elif parser.reading is not self._timed:
            self._time_reading()

    def _time_reading(self) -> None:
        """Sets the timer for the current part of a request, except for a body that waits for `100 Continue`."""
        parser = self._parser
        if parser.awaits_leave and not self._ahead and self._exchange is None and not self._ended:
            parser.awaits_leave = False
            if not parser.body_bytes:
                self._transport.write(_CONTINUE)
        waits = parser.awaits_leave and not parser.body_bytes
        self._set_timer(Reading.NOTHING if waits else parser.reading)

    # Calls from the port.

    def drain(self) -> None:
        """Closes the connection now, or after the reply to the current request.

        A new connection keeps its normal time for its first request: its timer ends it.
        """
        if self._ending or self._exchange is not None or self._paused or unread_bytes(self._transport):
            return
        parser = self._parser
        begun = parser.reading is Reading.BODY or (parser.reading is Reading.HEAD and parser.head_bytes > 0)
        if self._used and not begun:
            self._end_idle()

    def tick(self, seconds: float) -> None:
        """Also closes a connection that has been idle for too long."""
        super().tick(seconds)
        if (
            self._idle_since is not None
            and self.loop.time() - self._idle_since > self.port.settings.keep_alive_s
            and not unread_bytes(self._transport)  # a request that has arrived in time
        ):
            self._end_idle()

    def idle_since(self) -> tuple[bool, float] | None:
        begun = self._parser.head_bytes and self._lingering is None
        return None if begun else super().idle_since()

    def close_if_idle(self) -> None:
        """Closes an idle connection at once to free its slot. It lingers if the client has not received all data."""
        if unsent_bytes(self._transport):
            self._end_idle()
        else:
            self.abort()

    # Exchanges.

    def _answer_next(self, *, ahead: bool) -> None:
        """Starts the next exchange. `ahead` says that the request waited behind another one."""
        request, keep_alive = self._ahead.popleft()
        self._idle_since = None
        self._knows_interim = not request.http_1_0
        if self._paused and not self._ahead:
            self._read_on_next_turn()
        self._exchange = self.loop.create_task(self._answer(request, keep_alive=keep_alive, ahead=ahead))

    async def _answer(self, request: HttpRequest, *, keep_alive: bool, ahead: bool) -> None:
        """Runs an exchange. Nothing awaits it: it always ends in a reply or the end of the connection."""
        try:
            if ahead:
                await self.port.turns.wait(_ANSWER_S)
            reply = await self.port.app.answer(request)
            if request.held:
                self.share.give(request.held)
            if len(reply.body) > FREE_BYTES:
                reply = self._with_room(request, reply)
            if not self._writable.is_set():
                await self._writable.wait()
            keep_alive = keep_alive and self._goes_on()
            self._send(request, reply, keep_alive=keep_alive)
            self._exchange = self._told = None
            self._answered(keep_alive=keep_alive)
        except asyncio.CancelledError:
            self.port.app.gone(request)
            raise
        except Exception as error:  # noqa: BLE001  the HTTP boundary, for the making of replies
            self._rescue(request, error)

    def _with_room(self, request: HttpRequest, reply: HttpReply) -> HttpReply:
        """A large reply with buffer space for its body, if that is sent; otherwise a rejection."""
        if not sends_body(request, reply):
            return reply
        size = len(reply.body)
        if not self.share.take_made(size):
            return self.port.app.refuse(BuffersFull(), request)
        self._made_room = size
        return reply

    def _goes_on(self) -> bool:
        if not (self._ended or self.port.app.context.lifecycle.closing or self._lifetime_s <= 0):
            return True
        self._ending = True  # requests already read are still answered
        return bool(self._ahead or self._last_refusal)

    def _send(self, request: HttpRequest, reply: HttpReply, *, keep_alive: bool) -> None:
        """Writes a reply and records it. This is the only place that writes replies."""
        port = self.port
        body = reply.body if sends_body(request, reply) else b""
        parts = (
            _STATUS_LINES[reply.status],
            port.date,
            head_lines(port.app.origins, request, reply),
            (_KEPT if request.http_1_0 else b"\r\n") if keep_alive else b"connection: close\r\n\r\n",
            body,
        )
        data = b"".join(parts)
        if self._look is not None:
            self._look.cancel()
        self._told = reply
        self._transport.write(data)
        port.app.sent(request, reply, len(body))

    def _rescue(self, request: HttpRequest, error: Exception) -> None:
        """Handles a failure while making a reply: sends a short error reply, or ends the connection."""
        self._exchange = None
        self._ahead.clear()
        left = False
        try:
            log.error("a reply failed", exc_info=error, extra=fields(request_id=request.request_id))
            if self._told is not None:  # a reply has been sent
                self.port.app.sent(request, msgspec.structs.replace(self._told, error=InternalError()), 0)
            else:
                self._send_refusal(request, InternalError())
                left = True
        finally:
            if not left:
                self._transport.abort()

    def _answered(self, *, keep_alive: bool) -> None:
        if self._made_room:
            self._reply_room, self._made_room = self._made_room, 0
            self.loop.call_soon(self._reply_taken)  # after the write, which may have filled the buffer
        if not keep_alive:
            self._leave()
        elif self._ahead:
            self._answer_next(ahead=True)
        elif self._last_refusal is not None:
            self._send_refusal(*self._last_refusal)
        elif self._ended:
            self._leave()
        elif self._parser.reading is Reading.NOTHING:
            self._used = True
            self._idle_since = self.loop.time()
        if self._parser.awaits_leave and not self._ending:
            self._time_reading()

    def _refuse(self, error: BertserveError) -> None:
        """Answers with an error, after the replies to earlier requests, and ends the connection."""
        self._ending = True
        self._rest = b""
        error.without_traceback()
        parser = self._parser
        self._set_timer(Reading.NOTHING)
        request = parser.partial_request()
        if self._exchange is not None:
            self._last_refusal = request, error
        elif not self._transport.is_closing():
            self._send_refusal(request, error)

    def _send_refusal(self, request: HttpRequest, error: BertserveError) -> None:
        self._send(request, self.port.app.refuse(error, request), keep_alive=False)
        self._leave(_QUICK_LINGER_S if isinstance(error, SlowRequest) else _LINGER_S)

    def _end_idle(self) -> None:
        """Closes an idle connection: at once if the client has received all data, else with a linger."""
        if self._transport.can_write_eof() and not unsent_bytes(self._transport):
            self._idle_since = None
            self._transport.close()
        else:
            self._leave(_QUICK_LINGER_S)

    def _leave(self, linger_s: float = _LINGER_S) -> None:
        self._set_timer(Reading.NOTHING)
        self.linger(linger_s, heard_all=self._ended)

    def _set_timer(self, reading: Reading) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timed = reading
        if reading is not Reading.NOTHING:
            seconds = self.port.header_timeout_s if reading is Reading.HEAD else self.port.body_timeout_s
            self._timer = self.loop.call_later(seconds, guarded, self.abort, self._too_slow, reading, seconds)

    def _too_slow(self, reading: Reading, seconds: float) -> None:
        if unread_bytes(self._transport) and not self._paused:
            self._timer = self.loop.call_later(_UNREAD_S, guarded, self.abort, self._too_slow, reading, seconds)
            return
        if not self._parser.head_bytes and reading is Reading.HEAD:
            self._end_idle()  # the client never sent a byte
            return
        part = "headers" if reading is Reading.HEAD else "body"
        self._refuse(SlowRequest(f"the request's {part} did not arrive within {seconds:g} s"))
