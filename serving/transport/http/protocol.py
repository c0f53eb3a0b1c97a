"""uvicorn's HTTP/1.1 protocol with the limits that it lacks.

Bounded: header bytes and lines (431), body bytes (413), the time in which each must arrive (408). A request
that arrives in one piece, as nearly all do, sets no timer. A connection that ends cancels its exchange, so
that nothing computes for a client that has gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serving.errors import BertserveError, BodyTooLarge, HeadersTooLarge, MalformedRequest, SlowRequest
from serving.transport.http.exchange import REPLY, error_reply, request_id

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from starlette.types import Scope
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from serving.settings import Settings
    from serving.transport.http.exchange import Headers

_FRAMING_BYTES = 6 * 65_536
"""What chunked framing may add to a body: 65,536 chunks of the smallest kind."""

_LINGER_S = 5.0
"""How long what a refused client still sends is read and thrown away, so that it can read the refusal."""


@dataclass(slots=True, frozen=True)
class Limits:
    """What a request may take."""

    header_bytes: int
    header_count: int
    header_s: float
    body_bytes: int
    body_s: float

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """The limits that the settings name."""
        return cls(
            header_bytes=settings.header_limit_bytes,
            header_count=settings.header_limit_count,
            header_s=settings.header_timeout_s,
            body_bytes=settings.body_limit_bytes,
            body_s=settings.body_timeout_s,
        )


class _Reading(Enum):
    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        *args: Any,  # noqa: ANN401  uvicorn's own arguments, passed on
        limits: Limits,
        closing: Callable[[], bool],
        record_error: Callable[[BertserveError], None],
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Takes uvicorn's arguments and ours.

        Args:
            *args: uvicorn's.
            limits: What a request may take.
            closing: Whether replies should ask the client to close the connection.
            record_error: Told of each refusal.
            **kwargs: uvicorn's.
        """
        super().__init__(*args, **kwargs)
        self.url = b""  # uvicorn sets it when a request begins; a refusal may come before
        self._limits = limits
        self._closing = closing
        self._record_error = record_error
        self._reading = _Reading.NOTHING
        self._timed = _Reading.NOTHING
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._body_bytes = 0
        self._framing_bytes = 0
        self._violation: BertserveError | None = None
        self._refused = False
        self._running: asyncio.Task[None] | None = None
        self._idle_since: float | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Starts the clock of the first request's headers."""
        super().connection_made(transport)
        self._reading = _Reading.HEAD
        self._set_timer(_Reading.HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the exchange under way: its client has gone."""
        self._set_timer(_Reading.NOTHING)
        if self._writing is not None:
            self._writing.cancel()
        super().connection_lost(exc)
        if self._running is not None:
            self._running.cancel()

    def data_received(self, data: bytes) -> None:
        """Parses, counts and times."""
        if self._refused:
            return
        if self._reading is _Reading.BODY:
            self._framing_bytes += len(data)
        else:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._refused:
            return
        if self._framing_bytes > self._limits.header_bytes + _FRAMING_BYTES:
            self._refuse(BodyTooLarge("the framing of the body's chunks takes too many bytes; send larger chunks"))
        elif self._reading is _Reading.HEAD and self._head_bytes > self._limits.header_bytes:
            self._refuse(self._headers_too_large())
        elif self._reading is not self._timed:
            self._set_timer(self._reading)

    def on_message_begin(self) -> None:
        """A request starts."""
        super().on_message_begin()
        self._reading = _Reading.HEAD
        self._idle_since = None
        self._body_bytes = self._framing_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts header lines, and the bytes of trailers, which no application sees."""
        if self._reading is _Reading.BODY:
            self._head_bytes += len(name) + len(value) + 4
            if self._head_bytes > self._limits.header_bytes:
                self._violate(self._headers_too_large())
        if len(self.headers) >= self._limits.header_count:
            self._violate(HeadersTooLarge(f"more than {self._limits.header_count} headers"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Checks what the headers announce, then starts the exchange."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.header_bytes:
            self._violate(self._headers_too_large())
        self._head_bytes = 0
        for name, value in self.headers:
            if name == b"content-length" and int(value) > self._limits.body_bytes:
                self._violate(self._body_too_large())
        self._reading = _Reading.BODY
        super().on_headers_complete()
        scope = cast("Scope", self.cycle.scope)
        scope["extensions"] = {REPLY: partial(self._reply, self.cycle)}
        if self._closing():
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Counts what a chunked body really brings."""
        self._body_bytes += len(body)
        self._framing_bytes -= len(body)
        if self._body_bytes > self._limits.body_bytes:
            self._violate(self._body_too_large())
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._reading = _Reading.NOTHING
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  uvicorn's sentence is replaced by ours
        """Called by uvicorn where parsing failed, also by our own hand."""
        self._refuse(self._violation or MalformedRequest("the bytes received are not an HTTP/1.1 request"))

    def on_response_complete(self) -> None:
        """The exchange is over: start the next one that is queued, or be idle; `close_if_idle` ends that."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._idle_since = self.loop.time()

    def close_if_idle(self, now: float, keep_alive_s: float) -> None:
        """Ends a connection that has asked nothing for so long."""
        if self._idle_since is not None and now - self._idle_since > keep_alive_s:
            self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read its reply: it gets as long as a client gets to send a body."""
        super().pause_writing()
        self._writing = self.loop.call_later(self._limits.body_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:  # noqa: ANN401  uvicorn's types
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
        self._running = task

    async def _reply(self, cycle: RequestResponseCycle, status: int, headers: Headers, body: bytes) -> None:
        """Writes a whole reply in one piece, where ASGI takes two messages and checks each header."""
        if self.flow.write_paused and not cycle.disconnected:
            await self.flow.drain()
        if cycle.disconnected:
            return
        parts = [STATUS_LINE[status]]
        for name, value in (*self.server_state.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        if not cycle.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        if cycle.scope["method"] != "HEAD":
            parts.append(body)
        self.transport.write(b"".join(parts))
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    def _violate(self, error: BertserveError) -> None:
        """Stops the parser: it turns an exception of a callback into its own error."""
        self._violation = error
        raise error

    def _refuse(self, error: BertserveError) -> None:
        """Answers an error in place of the application and ends the connection."""
        self._refused = True
        self._record_error(error)
        self._set_timer(_Reading.NOTHING)
        started = False
        cycle = cast("Any", self.cycle)  # uvicorn declares it set; before the first request it is None
        if cycle is not None and not cycle.response_complete:
            started = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
        if self.transport.is_closing():
            return
        if not started:
            self.transport.write(_raw_reply(self.url or b"/", error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        # A silent client has nothing left to send; another may need its time to notice the refusal.
        self.loop.call_later(1.0 if isinstance(error, SlowRequest) else _LINGER_S, self.transport.close)

    def _set_timer(self, reading: _Reading) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timed = reading
        if reading is not _Reading.NOTHING:
            seconds = self._limits.header_s if reading is _Reading.HEAD else self._limits.body_s
            self._timer = self.loop.call_later(seconds, self._too_slow, reading, seconds)

    def _too_slow(self, reading: _Reading, seconds: float) -> None:
        if not self._head_bytes and reading is _Reading.HEAD:
            self.transport.close()  # connected and never said a word
            return
        part = "headers" if reading is _Reading.HEAD else "body"
        self._refuse(SlowRequest(f"the request's {part} did not arrive within {seconds:g} s"))

    def _headers_too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(f"the request's line and headers exceed {self._limits.header_bytes} bytes")

    def _body_too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body exceeds {self._limits.body_bytes} bytes")


def _raw_reply(url: bytes, error: BertserveError) -> bytes:
    path = url.split(b"?")[0].decode("ascii", "replace")
    identity = request_id(None)
    reply = error_reply(path, error, identity)
    phrase = HTTPStatus(reply.status).phrase
    head = (
        f"HTTP/1.1 {reply.status} {phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(reply.body)}\r\nx-request-id: {identity}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + reply.body
