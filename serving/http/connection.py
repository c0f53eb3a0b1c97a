"""An HTTP/1.1 connection: answers requests one after another and writes the replies.

A request that arrives in one piece, as nearly all do, needs no buffer space. Received bytes are parsed in pieces, up to
a limit per turn of the event loop. The rest queues behind the bytes of other connections. The head and the body of a
request must each arrive in time (408). Pipelined requests wait for the replies before theirs; meanwhile the connection
reads nothing, and no time runs out. The end of a connection cancels its exchange, so that nothing is computed for a
client that has gone. If a client half-closes (FIN, or TLS's close_notify), complete requests are answered first. An
incomplete request is not answered.

A request is one task and one write. uvicorn's protocol, with its cycle, event and messages per request, was measured to
cost a third of the server's time for a short text.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from bertserve.serving.errors import BuffersFull, InternalError, SlowRequest
from bertserve.serving.http.http1 import Reading, RequestParser
from bertserve.serving.http.replies import head_lines, sends_body
from bertserve.serving.logs import fields
from bertserve.serving.net.buffers import FREE_BYTES
from bertserve.serving.net.connection import Connection, Phase
from bertserve.serving.net.lingering_close import unread_bytes, unsent_bytes
from bertserve.serving.security.tls import HalfOpen

if TYPE_CHECKING:
    from bertserve.serving.errors import BertserveError
    from bertserve.serving.http.exchange import HttpReply, HttpRequest
    from bertserve.serving.http.port import HttpPort

log = logging.getLogger("bertserve.http")

_LINGER_S = 5.0
"""Seconds for which input of a rejected client is discarded, so that the client can read the rejection."""

_QUICK_LINGER_S = 1.0
"""The same for a client that has fallen silent and has nothing left to send."""

_PIECE_BYTES = 2048
"""Bytes that are parsed between checks for waiting requests, as later requests wait for earlier ones."""

_TURN_BYTES = 32_768
"""Bytes that a connection parses per turn of the event loop; for a body of known length, all received bytes."""

_FRAMING_COST = 16
"""Weight of a byte of chunk framing in a turn: small chunks cost parsing time and carry little data."""

_ANSWER_S = 0.0002
"""Approximate time that the answer to a pipelined request takes in its turn, in seconds."""

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_KEPT = b"connection: keep-alive\r\n\r\n"
"""Ends the head of a reply to HTTP/1.0, whose clients expect a closed connection unless told otherwise."""


class HttpConnection(Connection["HttpPort[Any]"]):
    __slots__ = ("_exchange", "_parser", "_reply_room", "_rest_room", "_writable")

    _PIECE_BYTES = _PIECE_BYTES
    _TAKEN_BYTES = FREE_BYTES

    def __init__(self, port: HttpPort[Any]) -> None:
        super().__init__(port)
        self._parser = RequestParser(port, self.share)
        self._exchange: asyncio.Task[None] | None = None
        self._rest_room = self._reply_room = 0
        self._writable = asyncio.Event()
        self._writable.set()

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport.set_write_buffer_limits(FREE_BYTES)
        secured = transport.get_extra_info("ssl_object")
        if isinstance(secured, HalfOpen):
            secured.on_end = partial(self.loop.call_soon, self.eof_received)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the current exchange, and drops references that would keep this object alive."""
        secured = self._transport.get_extra_info("ssl_object")
        if isinstance(secured, HalfOpen):
            secured.on_end = None
        if self._exchange is not None:
            self._exchange.cancel()
            self._exchange = None  # its CancelledError has a traceback that refers to this object
        self._parser.close()
        super().connection_lost(exc)

    def eof_received(self) -> bool:
        """Handles a half-close (RFC 9112, 9.6): answers complete requests, then ends the connection.

        Over TLS this may be called before earlier bytes have been parsed.
        """
        if self._phase is Phase.LINGERING or not (self._exchange or self._paused):
            self._transport.close()  # no reply is due
        elif not self._transport.is_closing():
            self._phase = Phase.HALF_CLOSED
        return self._transport.can_write_eof()

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
        parser = self._parser
        if parser.requests:
            return
        self.share.give(self._rest_room)
        self._rest_room = 0
        rest, at, left = memoryview(self._rest), 0, _TURN_BYTES
        while at < len(rest) and left > 0 and not (parser.requests or parser.reading is Reading.OVER):
            missing = parser.length - parser.body_bytes if parser.reading is Reading.BODY else 0
            piece = rest[at : at + max(_PIECE_BYTES, missing)]
            at += len(piece)
            framing = parser.framing_bytes
            self.receive(piece)
            left -= len(piece) + _FRAMING_COST * max(0, parser.framing_bytes - framing)
        if parser.reading is Reading.OVER:
            self._end_input()
            return
        self._rest = rest[at:]
        if parser.requests:
            self._keep_rest()
        elif self._rest or left <= 0:
            self._pause()
            self._read_on_next_turn()
        elif self._paused:
            self._resume()
            self._since = self.loop.time()
            if self._phase is Phase.HALF_CLOSED and self._exchange is None:
                self._transport.close()

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
        parser, part = self._parser, self._parser.reading
        parser.feed(data)
        if parser.requests:
            part = Reading.NOTHING  # what follows is part of another request
            self._answer_requests()
        reading = parser.reading
        if reading is Reading.OVER:
            self._end_input()
        elif parser.requests:
            self._pause()
        elif reading is not Reading.NOTHING:
            self._phase = max(self._phase, Phase.BUSY)
            if reading is not part:
                self._since = self.loop.time()
                self._permit_body()

    def _permit_body(self) -> None:
        """Asks for a body whose client waits for that, once no reply is due."""
        if self._parser.reading is Reading.PERMISSION and self._exchange is None:
            self._parser.reading = Reading.BODY
            self._since = self.loop.time()
            self._transport.write(_CONTINUE)

    def _end_input(self) -> None:
        """Discards further input."""
        self._phase = max(self._phase, Phase.LAST)
        self._rest = b""

    # Calls from the port.

    def drain(self) -> None:
        """Closes the connection now, or after the reply to the current request.

        A new connection keeps its normal time for its first request.
        """
        if self._phase is Phase.IDLE and not (self._paused or unread_bytes(self._transport)):
            self._end_idle()

    def tick(self, seconds: float) -> None:
        """Also ends a connection whose client is late, and looks for clients that have gone."""
        super().tick(seconds)
        phase, parser, port = self._phase, self._parser, self.port
        if phase is Phase.HALF_CLOSED:
            self._look_for_client()
        if phase > Phase.BUSY or self._paused:
            return
        if phase is Phase.IDLE:
            limit_s = port.settings.keep_alive_s
        elif parser.reading is Reading.HEAD:
            limit_s = port.header_timeout_s
        elif parser.reading is Reading.BODY:
            limit_s = port.body_timeout_s
        else:
            return
        # After a stall of the event loop, bytes may be unread that arrived in time.
        if self.loop.time() - self._since <= limit_s or unread_bytes(self._transport):
            return
        if phase is Phase.BUSY:
            part = "headers" if parser.reading is Reading.HEAD else "body"
            self._refuse(SlowRequest(f"the request's {part} did not arrive within {limit_s:g} s"))
        else:
            self._end_idle()

    def _look_for_client(self) -> None:
        """Writes to a half-closed client that awaits a reply. A client that has gone answers with a reset.

        Clients ignore an interim reply. TLS needs no check, because a client that leaves ends TCP, too.
        """
        if self._exchange and self._transport.can_write_eof() and not self._parser.http_1_0:
            self._transport.write(_CONTINUE)

    def close_if_idle(self) -> None:
        """Closes an idle connection at once to free its slot. It lingers if the client has not received all data."""
        if unsent_bytes(self._transport):
            self._end_idle()
        else:
            self.abort()

    # Exchanges.

    def _answer_requests(self) -> None:
        self._phase = max(self._phase, Phase.BUSY)
        if self._exchange is None:
            self._exchange = self.loop.create_task(self._answer(self._parser.requests.popleft()))

    async def _answer(self, request: HttpRequest) -> None:
        """Answers a request, and then those that wait behind it.

        Nothing awaits this: it always ends in a reply or the end of the connection.
        """
        port = self.port
        try:
            while True:
                if request.rejection is None:
                    reply = await port.app.answer(request)
                else:
                    reply = port.app.refuse(request.rejection, request)
                if request.held:
                    self.share.give(request.held)
                room = 0
                if len(reply.body) > FREE_BYTES:
                    reply, room = self._with_room(request, reply)
                await self._writable.wait()
                keep_alive = self._send(request, reply, room)
                if not self._parser.requests:
                    break
                request = await self._next_request()
        except asyncio.CancelledError:
            port.app.gone(request)
            raise
        except Exception as error:  # noqa: BLE001  the HTTP boundary, for the making of replies
            self._rescue(request, error)
        else:
            self._end_exchange(request, keep_alive=keep_alive)

    async def _next_request(self) -> HttpRequest:
        """The oldest waiting request, in a turn in which it may be answered."""
        waiting = self._parser.requests
        await self.port.turns.wait(_ANSWER_S)
        request = waiting.popleft()
        if self._paused and not waiting:
            self._read_on_next_turn()
        return request

    def _with_room(self, request: HttpRequest, reply: HttpReply) -> tuple[HttpReply, int]:
        """A large reply and the buffer space taken for its body, if that is sent; otherwise a rejection."""
        if not sends_body(request, reply):
            return reply, 0
        size = len(reply.body)
        return (reply, size) if self.share.take_made(size) else (self.port.app.refuse(BuffersFull(), request), 0)

    def _send(self, request: HttpRequest, reply: HttpReply, room: int = 0) -> bool:
        """Writes a reply and records it; returns whether the connection stays open. Nothing else writes replies."""
        port = self.port
        if self._lifetime_s <= 0 or port.app.context.lifecycle.closing:
            self._end_input()
        keep_alive = self._phase is Phase.BUSY or bool(self._parser.requests or self._rest)
        body = reply.body if sends_body(request, reply) else b""
        parts = (
            _STATUS_LINES[reply.status],
            port.date,
            head_lines(port.app.origins, request, reply),
            (_KEPT if request.http_1_0 else b"\r\n") if keep_alive else b"connection: close\r\n\r\n",
            body,
        )
        self._transport.write(b"".join(parts))
        if room:
            self._reply_room += room
            self.loop.call_soon(self._reply_taken)  # after the write, which may have filled the buffer
        port.app.sent(request, reply, len(body))
        return keep_alive

    def _end_exchange(self, request: HttpRequest, *, keep_alive: bool) -> None:
        self._exchange = None
        if not keep_alive:
            self._leave(_QUICK_LINGER_S if isinstance(request.rejection, SlowRequest) else _LINGER_S)
        elif self._parser.reading is not Reading.NOTHING:
            self._permit_body()
        elif self._phase is Phase.BUSY:
            self._phase, self._since = Phase.IDLE, self.loop.time()

    def _rescue(self, request: HttpRequest, error: Exception) -> None:
        """Handles a failure while making a reply: sends a short error reply, or ends the connection."""
        self._exchange = None
        self._parser.requests.clear()
        self._end_input()
        left = False
        try:
            log.error("a reply failed", exc_info=error, extra=fields(request_id=request.request_id))
            if not request.ended:
                self._send(request, self.port.app.refuse(InternalError(), request))
                self._leave(_LINGER_S)
                left = True
        finally:
            if not left:
                self._transport.abort()

    def _refuse(self, error: BertserveError) -> None:
        """Answers with an error, after the replies to earlier requests, and ends the connection."""
        self._parser.reject(error)
        self._end_input()
        self._answer_requests()

    def _end_idle(self) -> None:
        """Closes an idle connection: at once if the client has received all data, else with a linger."""
        if self._transport.can_write_eof() and not unsent_bytes(self._transport):
            self._transport.close()
        else:
            self._leave(_QUICK_LINGER_S)

    def _leave(self, linger_s: float) -> None:
        self.linger(linger_s, heard_all=self._phase is Phase.HALF_CLOSED)
