"""HTTP/1.1 on one connection: httptools parses, this bounds, times and answers.

Bounded: header bytes and lines (431), body bytes (413), the time in which each must arrive (408), the time in which a
reply must be taken, and the bytes that all connections hold (503). A request that arrives in one piece, as nearly all
do, sets no timer and needs no room. What is received at once is parsed in pieces, so much in a turn of the event loop,
and the rest behind what others have sent. Requests sent ahead are answered one after another; while some wait, nothing
is read and no timer runs. A connection that ends cancels its exchange, so that nothing computes for a client that has
gone. One whose client has only said all (FIN, or TLS's close_notify) is answered first; what it left unfinished is not.

There is no ASGI before a hot route: a request is one task and one write. uvicorn's protocol, with its cycle, event
and messages for each request, was measured to cost a third of what the server spends on a short text. All other
routes are answered by the application, whose ASGI server this is.

An upload is answered while its body arrives: of that only a window is held, and nothing is received while it is full.
A file goes back in pieces, each when the client has taken the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote_to_bytes

import httptools
import msgspec

from serving.errors import (
    BertserveError,
    BodyTooLarge,
    BuffersFull,
    HeadersTooLarge,
    InternalError,
    Limit,
    MalformedRequest,
    NotReady,
    ObjectNotFound,
    SlowRequest,
    Unsupported,
    VersionNotSpoken,
    WrongHost,
)
from serving.http.api import refuse
from serving.http.asgi import FILE_BYTES, body_too_large, call_app
from serving.http.body_stream import WINDOW_BYTES, ReceivedBody
from serving.http.exchange import HttpRequest
from serving.http.middleware import announces_body, is_known_host, is_preflight, unauthenticated
from serving.http.replies import head_lines, sends_body
from serving.http.routes import HotRoute, UploadRoute
from serving.logs import fields
from serving.net.buffers import FREE_BYTES
from serving.net.farewell import Farewell, unread_bytes, unsent_bytes
from serving.net.ports import lifetime_s
from serving.net.requests import combined, request_id, words
from serving.net.turns import TurnQueue
from serving.security.tls import HalfOpen
from serving.unawaited import guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from pathlib import Path

    from starlette.routing import BaseRoute

    from serving.http.app import App
    from serving.http.exchange import HttpReply
    from serving.net.buffers import BufferBudget
    from serving.settings import Settings

log = logging.getLogger("bertserve.http")

_FRAMING_BYTES = 6 * 65_536
"""What chunked framing may add to a body: 65,536 chunks of the smallest kind."""

_LINGER_S = 5.0
"""How long what a refused client still sends is read and thrown away, so that it can read the refusal."""

_QUICK_LINGER_S = 1.0
"""The same for a client that has fallen silent: it has nothing left to send."""

_UNREAD_S = 0.01
"""How soon a timer looks again that finds bytes which came in time and are not read yet."""

_PIECE_BYTES = 2048
"""So much is parsed before it is asked whether requests wait: what these bytes hold may wait behind another request."""

_FRAMING_COST = 16
"""A byte of the framing of chunks counts for so many of a turn: small chunks take time, and bring nothing."""

_PIECES = 256
"""Of a body, at most: those of one byte each would take 60 times their size, and long to put together."""

_FORM_BYTES = 65_536
"""What a form may have beside the file in it."""

_ROOM_BYTES = 65_536
"""A body takes room for so much at a time."""

_ANSWER_S = 0.0002
"""What the answer to a request that was sent ahead takes, about, in its turn."""

_LOOK_S = 0.25
"""How soon after its end a client with a reply due is looked for; then after twice as long, and so on."""

_HOST = re.compile(rb"(\[[\w:.~!$&'()*+,;=%-]+\]|[\w.~!$&'()*+,;=%-]*)(:[0-9]*)?")
"""RFC 3986, section 3.2, without user information."""

_REMEMBERED = 256
"""Paths with parts that vary, models' names mostly."""

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_KEPT = b"connection: keep-alive\r\n\r\n"
"""Ends the head of a reply to HTTP/1.0, whose clients take a connection for closed unless they are told."""


@dataclass(slots=True, frozen=True)
class Limits:
    """What a request may take.

    Attributes:
        upload_bytes: Of the body of an upload.
        turn_bytes: What a connection parses in a turn of the event loop; of a body of known length, all that one read
            has brought.
    """

    header_bytes: int
    header_count: int
    header_s: float
    body_bytes: int
    free_bytes: int
    body_s: float
    upload_bytes: int
    lifetime_s: Callable[[], float]
    turn_bytes: int = 32_768

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """The limits that the settings name."""
        return cls(
            header_bytes=settings.header_limit_bytes,
            header_count=settings.header_limit_count,
            header_s=settings.header_timeout_s,
            body_bytes=settings.body_limit_bytes,
            free_bytes=min(FREE_BYTES, settings.body_limit_bytes),
            body_s=settings.body_timeout_s,
            upload_bytes=Limit((settings.batch_file_mb << 20) + _FORM_BYTES, "--batch-file-mb"),
            lifetime_s=partial(lifetime_s, settings),
        )


_ANY_TAIL = "{}"
"""Stands for the last parts of routes that end in a name."""


class HotRoutes:
    """Finds the hot route of a request."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._fixed: dict[tuple[str, str], HotRoute] = {}
        self._by_tail: dict[str, list[HotRoute]] = {}
        self._remembered: dict[tuple[str, str], tuple[HotRoute, dict[str, str]]] = {}
        for route in routes:
            if isinstance(route, HotRoute):
                if "{" in route.path:
                    tail = _tail(route.path)
                    self._by_tail.setdefault(_ANY_TAIL if "{" in tail else tail, []).append(route)
                else:
                    self._fixed[route.method, route.path] = route

    def find(self, request: HttpRequest) -> HotRoute | None:
        """The route, if it is a hot one; the parts of the path go into `request.parameters`."""
        key = (request.method, request.path)
        route = self._fixed.get(key)
        if route is not None:
            return route
        match = self._remembered.get(key) or self._search(key)
        if match is None:
            return None
        route, request.parameters = match
        return route

    def _search(self, key: tuple[str, str]) -> tuple[HotRoute, dict[str, str]] | None:
        method, path = key
        for route in (*self._by_tail.get(_tail(path), ()), *self._by_tail.get(_ANY_TAIL, ())):
            match = route.path_regex.match(path)
            if match is not None and method == route.method and path.isprintable():
                if len(self._remembered) >= _REMEMBERED:
                    self._remembered.clear()
                self._remembered[key] = route, match.groupdict()
                return self._remembered[key]
        return None


def _tail(path: str) -> str:
    return path.rpartition("/")[2]


@dataclass(slots=True)
class HttpPort:
    """What the connections of one port share.

    Attributes:
        app: Answers requests.
        limits: What a request may take.
        scheme: `http` or `https`.
        budget: What the connections may hold.
        hosts: Names that it goes by, as `is_known_host` takes them; None for any.
        turns: For what connections have sent beyond their first piece.
        hot: The routes that are answered past ASGI.
        uploads: Paths of POSTs that are answered while their bodies arrive.
        date: The Date header, a whole line.
        connections: All that are open.
    """

    app: App
    limits: Limits
    scheme: str
    budget: BufferBudget
    hosts: frozenset[str] | None = None
    turns: TurnQueue = field(default_factory=TurnQueue)
    hot: HotRoutes = field(init=False)
    uploads: frozenset[str] = frozenset()
    date: bytes = b""
    connections: set[HttpConnection] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.hot = HotRoutes(self.app.routes)
        if self.app.api.jobs is not None:
            self.uploads = frozenset(route.path for route in self.app.routes if isinstance(route, UploadRoute))


class _OpenFile:
    """A file that is sent, with the size that it has now."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")
        self.size = os.fstat(self.file.fileno()).st_size


class _Reading(Enum):
    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class HttpConnection(asyncio.Protocol):
    """One connection."""

    # More than thirty attributes without slots would each be looked up in a dictionary (3 us a request).
    __slots__ = (
        *("_again", "_ahead", "_body", "_body_bytes", "_end_waits", "_ended", "_ending", "_exchange", "_farewell"),
        *("_framing_bytes", "_head_bytes", "_header_bytes", "_header_lines", "_headers", "_held", "_host"),
        *("_idle_since", "_keep_alive", "_last_at", "_last_refusal", "_length", "_limits", "_loop", "_made_room"),
        *("_parser", "_path", "_paused", "_port"),
        *("_query", "_reading", "_reply_room", "_rest", "_rest_room", "_room", "_share", "_timed", "_timer"),
        *("_stream", "_streamed", "_told", "_transport", "_turn_is_due", "_unread", "_url", "_used", "_violation"),
        *("_knows_interim", "_look", "_old", "_waits_for_leave", "_writable"),
    )

    def __init__(self, port: HttpPort) -> None:
        """Waits for its transport."""
        self._port = port
        self._limits = port.limits
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._reading = _Reading.HEAD
        self._timed = _Reading.NOTHING
        self._timer: asyncio.TimerHandle | None = None
        self._rest = memoryview(b"")
        self._paused = self._turn_is_due = False
        self._ending = False
        self._ended = self._end_waits = False  # by the client
        self._again = False  # a head is read a second time
        self._old = False  # HTTP/1.0
        self._knows_interim = True
        self._look: asyncio.TimerHandle | None = None
        self._share = port.budget.share()
        self._rest_room = 0
        self._reply_room = self._made_room = 0
        self._path = ""
        self._query = b""
        self._host = b"/"  # the last one that was valid and known; this one never is
        self._keep_alive = True
        self._head_bytes = self._held = 0
        self._stream: ReceivedBody | None = None
        self._streamed = 0  # of its bytes, when its progress was looked at last
        self._forget_request()
        self._violation: BertserveError | None = None
        self._told: HttpReply | None = None  # to the request that is answered, at least in part
        self._last_refusal: tuple[HttpRequest, BertserveError] | None = None
        self._farewell: Farewell | None = None
        self._ahead: deque[tuple[HttpRequest, bool]] = deque()
        self._exchange: asyncio.Task[None] | None = None
        self._idle_since: float | None = self._loop.time()
        self._used = False
        self._last_at = self._loop.time() + port.limits.lifetime_s()
        self._unread: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts the clock of the first request's headers."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(FREE_BYTES)
        self._port.connections.add(self)
        secured = transport.get_extra_info("ssl_object")
        if isinstance(secured, HalfOpen):
            secured.on_end = partial(self._loop.call_soon, self.eof_received)
        self._set_timer(_Reading.HEAD)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  how it ended does not matter
        """Cancels the exchange under way, as its client has gone, and lets go of what would hold this object."""
        self._port.connections.discard(self)
        self._set_timer(_Reading.NOTHING)
        for timer in (self._unread, self._look, self._farewell):
            if timer is not None:
                timer.cancel()
        secured = self._transport.get_extra_info("ssl_object")
        if isinstance(secured, HalfOpen):
            secured.on_end = None
        self._ahead.clear()
        if self._exchange is not None:
            self._exchange.cancel()
            self._exchange = None  # it keeps its cancellation, whose traceback leads back here
        del self._parser  # it calls the methods of this object
        self._ending = True
        self._rest = memoryview(b"")
        self._forget_request()
        self._share.close()

    def data_received(self, data: bytes) -> None:
        """Parses, counts and times: what is short at once, else in pieces."""
        if self._ending:
            if self._farewell is not None:
                self._farewell.received(len(data))
            return
        if len(data) > _PIECE_BYTES or self._paused:
            self._rest = memoryview(bytes(self._rest) + data)
            if not self._paused:
                self._parse_turn()
        else:
            self._parse(data)

    def eof_received(self) -> bool:
        """The client has said all (RFC 9112, 9.6): what is whole is answered, then the connection ends.

        Over TLS it may be told before what came earlier has been parsed; then it waits for that.
        """
        plain = self._transport.can_write_eof()
        self._end_waits = self._paused
        if self._paused or self._transport.is_closing():
            return plain
        self._ended = True
        if self._exchange is None or self._stream is not None:
            self._transport.close()  # nothing is due, or only the answer to an upload that has no end
        elif self._knows_interim and plain:
            self._look = self._loop.call_later(_LOOK_S, guarded, self.abort, self._look_for_client, _LOOK_S)
        return plain

    def _look_for_client(self, waited_s: float) -> None:
        """Says something to a client that awaits a reply: one that has gone, and not only said all, resets that.

        An interim reply is nothing to a client that is there. TLS needs none, as whoever leaves ends TCP too.
        """
        self._transport.write(_CONTINUE)
        later_s = 2 * waited_s
        self._look = self._loop.call_later(later_s, guarded, self.abort, self._look_for_client, later_s)

    def _parse_turn(self) -> None:
        """Parses as much as a turn may; the rest waits for the next one, or until no request waits here."""
        at = 0
        left = self._limits.turn_bytes
        while at < len(self._rest) and left > 0 and not (self._ahead or self._ending or self._stream_is_full):
            missing = self._length - self._body_bytes if self._reading is _Reading.BODY else 0
            piece = self._rest[at : at + max(_PIECE_BYTES, missing)]
            at += len(piece)
            framing = self._framing_bytes
            self._parse(piece)
            left -= len(piece) + _FRAMING_COST * max(0, self._framing_bytes - framing)
        self._rest = self._rest[at:]
        if self._ending:
            self._rest = memoryview(b"")
        elif self._ahead:
            self._keep_rest()
        elif self._stream_is_full:
            self._pause()
        elif self._rest or left <= 0:
            self._pause()
            self._read_on_next_turn()
        elif self._paused:
            self._paused = False
            self._transport.resume_reading()
            if self._reading is not self._timed:
                self._time_reading()
            if self._end_waits:
                self.eof_received()

    @property
    def _stream_is_full(self) -> bool:
        return self._stream is not None and self._stream.full

    def _pause(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def _keep_rest(self) -> None:
        """Requests wait, so that this may wait long: it needs room."""
        size = len(self._rest)
        self._rest = memoryview(bytes(self._rest))
        if size <= FREE_BYTES:
            return
        if self._share.take(size):
            self._rest_room = size
        else:
            self._refuse(BuffersFull())

    def _read_on_next_turn(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self._port.turns.add(self._read_on)

    def _read_on(self) -> float:
        self._turn_is_due = False
        if not (self._ending or self._ahead):
            self._share.give(self._rest_room)
            self._rest_room = 0
            guarded(self.abort, self._parse_turn)
        return 0.0

    def _parse(self, data: bytes | memoryview) -> None:
        if self._reading is _Reading.BODY:
            self._framing_bytes += len(data)
        else:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
            return
        except httptools.HttpParserError as error:
            self._refuse_unparsed(error)
            return
        if self._framing_bytes > self._limits.header_bytes + _FRAMING_BYTES:
            self._refuse(BodyTooLarge("the framing of the body's chunks takes too many bytes; send larger chunks"))
        elif self._reading is _Reading.HEAD and self._head_bytes > self._limits.header_bytes:
            self._refuse(self._headers_too_large())
        elif self._ahead:
            self._pause()
            self._set_timer(_Reading.NOTHING)
        elif self._stream_is_full:
            self._pause()
        elif self._reading is not self._timed:
            self._time_reading()

    def _time_reading(self) -> None:
        """Times what is read now; a body that waits for leave is not late."""
        waits = self._waits_for_leave and not self._body_bytes
        self._set_timer(_Reading.NOTHING if waits else self._reading)

    def pause_writing(self) -> None:
        """The client does not read its reply: it must take some of it within the time for a body."""
        self._writable.clear()
        self._expect_progress()

    def resume_writing(self) -> None:
        """It reads again."""
        self._writable.set()
        if self._unread is not None:
            self._unread.cancel()
        self._reply_taken()

    def _expect_progress(self) -> None:
        size = self._transport.get_write_buffer_size()
        self._unread = self._loop.call_later(self._limits.body_s, guarded, self.abort, self._check_progress, size)

    def _check_progress(self, before: int) -> None:
        if before - self._transport.get_write_buffer_size() < FREE_BYTES:
            self._transport.abort()
        else:
            self._expect_progress()

    def _reply_taken(self) -> None:
        if self._writable.is_set():
            self._share.give(self._reply_room)
            self._reply_room = 0

    # What the parser calls.

    def on_message_begin(self) -> None:
        """A request starts."""
        if self._again:
            return
        self._reading = _Reading.HEAD
        self._idle_since = None
        self._head_bytes = max(1, self._head_bytes)  # in one piece with the end of the request before

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        self._url += url
        self._header_bytes += len(url)
        if self._header_bytes > self._limits.header_bytes:
            raise self._violated(self._headers_too_large())

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts header lines and their bytes, trailers included, which no handler sees."""
        self._header_lines += 1
        self._header_bytes += len(name) + len(value) + 4
        if self._header_lines > self._limits.header_count:
            raise self._violated(
                HeadersTooLarge(f"more than {self._limits.header_count} headers (--header-limit-count)")
            )
        if self._header_bytes > self._limits.header_bytes:
            raise self._violated(self._headers_too_large())
        if self._reading is _Reading.HEAD:
            name = name.lower()
            if name in self._headers:
                try:
                    value = combined(name, self._headers[name], value)
                except MalformedRequest as error:
                    raise self._violated(error) from None
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        """Checks what the headers announce: a key before a byte of the body is kept."""
        if self._again:
            return
        headers = self._headers
        self._keep_alive = self._parser.should_keep_alive()
        version = "1.1"
        if not self._keep_alive or b"connection" in headers:  # else it is 1.1, whose connections are kept unasked
            version = self._parser.get_http_version()
        self._old = version == "1.0"
        self._parse_target()
        if version != "1.1" or b"transfer-encoding" in headers or headers.get(b"host") != self._host:
            self._check_head(version)
        self._check_key()
        self._length = int(headers.get(b"content-length", b"0"))
        is_upload = self._path in self._port.uploads and self._parser.get_method() == b"POST"
        limit = self._limits.upload_bytes if is_upload else self._limits.body_bytes
        if self._length > limit:
            raise self._violated(body_too_large(limit))
        self._head_bytes = 0
        self._reading = _Reading.BODY
        if b"expect" in headers and version == "1.1":
            self._maybe_continue()
        if is_upload:
            self._begin_upload()

    def on_body(self, body: bytes) -> None:
        """Counts what a body really brings."""
        self._body_bytes += len(body)
        self._framing_bytes -= len(body)
        if self._stream is not None:
            if self._body_bytes > self._limits.upload_bytes:
                raise self._violated(body_too_large(self._limits.upload_bytes))
            self._stream.feed(body)
            return
        if self._body_bytes > self._room:
            self._make_room()
        self._body.append(body)
        if len(self._body) > _PIECES:
            self._body[:] = [b"".join(self._body)]

    def on_message_complete(self) -> None:
        """The request is whole: answer it, after those before it."""
        if self._parser.should_upgrade():
            if self._parser.get_method() == b"CONNECT":
                self._keep_alive = False  # what follows is no HTTP
            elif self._length or b"transfer-encoding" in self._headers:
                return  # its body is yet to be read; see `_decline`
        self._reading = _Reading.NOTHING
        self._head_bytes = 0
        if self._timer is not None:
            self._set_timer(_Reading.NOTHING)
        if self._stream is not None:
            self._stream.end()
            self._stream = None
            self._forget_request()
            return
        parser, headers, body = self._parser, self._headers, self._body
        if self._held:
            self._share.give(self._held - self._body_bytes)
            self._held = self._body_bytes
        identity = request_id(headers.get(b"x-request-id"))
        content = body[0] if len(body) == 1 else b"".join(body)
        request = HttpRequest(
            *(parser.get_method().decode(), self._path, headers, content, identity),
            *(time.perf_counter(), self._query, self._share, self._held),
        )
        request.http_1_0 = self._old
        self._forget_request()
        self._ahead.append((request, self._keep_alive))
        if self._exchange is None:
            self._answer_next(ahead=False)

    def _begin_upload(self) -> None:
        """Has an upload answered while its body arrives. What is held of that takes room from the beginning."""
        parser, headers = self._parser, self._headers
        if not self._share.take(WINDOW_BYTES):
            raise self._violated(BuffersFull())
        self._stream = ReceivedBody(self._read_on_next_turn)
        self._streamed = 0
        request = HttpRequest(
            *(parser.get_method().decode(), self._path, headers, b"", request_id(headers.get(b"x-request-id"))),
            *(time.perf_counter(), self._query, self._share, WINDOW_BYTES),
            stream=self._stream,
            http_1_0=self._old,
        )
        self._ahead.append((request, self._keep_alive))
        if self._exchange is None:
            self._answer_next(ahead=False)

    # What the port and its places call.

    def end_when_idle(self) -> None:
        """Closes the connection now, or once the request that has begun is answered; to be called again and again.

        A new one whose request is still to come has as long for it as ever: its timer ends it.
        """
        if self._ending or self._exchange is not None or self._paused or unread_bytes(self._transport):
            return
        begun = self._reading is _Reading.BODY or (self._reading is _Reading.HEAD and self._head_bytes > 0)
        if self._used and not begun:
            self._end_idle()

    def refuse_upload(self, error: BertserveError) -> None:
        """Gives up what is not here yet of an upload, if there is one."""
        if self._stream is not None:
            self._refuse(error)

    def close_if_idle(self, now: float, keep_alive_s: float) -> None:
        """Ends a connection on which no request has begun for so long."""
        if (
            self._idle_since is not None
            and now - self._idle_since > keep_alive_s
            and not unread_bytes(self._transport)  # the request that it waited for, which has come in time
        ):
            self._end_idle()

    def abort(self) -> None:
        """Ends the connection at once: nobody can say anything on it any more."""
        self._transport.abort()

    def idleness(self) -> tuple[bool, float] | None:
        """Whether it was ever used, and since when it is idle; None where it is not."""
        if self._idle_since is None or self._transport.is_closing():
            return None
        if self._head_bytes if self._farewell is None else unsent_bytes(self._transport):
            return None
        return self._used, self._idle_since

    def give_way(self) -> None:
        """Ends an idle connection at once, for another one, unless its client has not received all that was said."""
        if unsent_bytes(self._transport):
            self._end_idle()
        else:
            self._transport.abort()

    # What this class does with a request.

    def _answer_next(self, *, ahead: bool) -> None:
        """Begins the next exchange; `ahead` says that its request has waited for another one."""
        request, keep_alive = self._ahead.popleft()
        self._knows_interim = not request.http_1_0
        if self._paused and not self._ahead:
            self._read_on_next_turn()
        self._exchange = self._loop.create_task(self._answer(request, keep_alive=keep_alive, ahead=ahead))

    async def _answer(self, request: HttpRequest, *, keep_alive: bool, ahead: bool) -> None:
        """An exchange. Nobody awaits it: whatever happens in it ends in a reply or the end of the connection."""
        try:
            if ahead:
                await self._port.turns.wait(_ANSWER_S)
            reply = await self._reply_to(request)
            if request.held:
                self._share.give(request.held)
            if isinstance(request.stream, ReceivedBody) and not request.stream.ended:
                self._abandon_upload()
                keep_alive = False
            opened: _OpenFile | None = None
            if reply.file is not None:
                reply, opened = await self._open_file(request, reply, reply.file)
            elif len(reply.body) > FREE_BYTES:
                reply = self._with_room(request, reply)
            if not self._writable.is_set():
                await self._writable.wait()
            keep_alive = keep_alive and self._goes_on()
            if opened is None:
                self._send(request, reply, keep_alive=keep_alive)
            else:
                await self._send_file(request, reply, opened, keep_alive=keep_alive)
            self._exchange = self._told = None
            self._answered(keep_alive=keep_alive)
        except asyncio.CancelledError:
            self._port.app.api.gone(request)
            raise
        except Exception as error:  # noqa: BLE001  the HTTP boundary, for the making of replies
            self._rescue(request, error)

    def _reply_to(self, request: HttpRequest) -> Coroutine[Any, Any, HttpReply]:
        """What answers a request. It is no coroutine itself, as each one more costs every request its part."""
        port = self._port
        route = port.hot.find(request)
        if route is not None:
            return port.app.api.answer(route.direct, route.path, request)
        request.route = port.app.route_of(request.path)
        client = self._transport.get_extra_info("peername")
        return call_app(port.app, request, port.scheme, client and client[:2])

    def _with_room(self, request: HttpRequest, reply: HttpReply) -> HttpReply:
        """A large reply with room for its body, if that goes out; or the refusal in its place."""
        if not sends_body(request, reply):
            return reply
        size = len(reply.body)
        if not self._share.take_made(size):
            return refuse(BuffersFull(), request)
        self._made_room = size
        return reply

    def _goes_on(self) -> bool:
        """Whether a connection that its client would keep is kept."""
        if not (self._ended or self._port.app.api.lifecycle.closing or self._loop.time() >= self._last_at):
            return True
        self._ending = True  # what has been read is still answered
        return bool(self._ahead or self._last_refusal)

    def _send(self, request: HttpRequest, reply: HttpReply, length: int | None = None, *, keep_alive: bool) -> None:
        """Writes a reply and records it; with a `length` its head alone, as a file of that length follows.

        This is the only place where replies are written, whichever layer makes them.
        """
        port = self._port
        body = reply.body if length is None and sends_body(request, reply) else b""
        parts = (
            _STATUS_LINES[reply.status],
            port.date,
            head_lines(port.app.api, port.app.origins, request, reply, len(reply.body) if length is None else length),
            (_KEPT if request.http_1_0 else b"\r\n") if keep_alive else b"connection: close\r\n\r\n",
            body,
        )
        data = b"".join(parts)
        if self._look is not None:
            self._look.cancel()
        self._told = reply
        self._transport.write(data)
        if length is None:
            port.app.api.sent(request, reply, len(body))

    def _rescue(self, request: HttpRequest, error: Exception) -> None:
        """What made a reply has failed: a short one goes out in its place, or the connection ends."""
        self._exchange = None
        self._ahead.clear()
        left = False
        try:
            log.error("a reply failed", exc_info=error, extra=fields(request_id=request.request_id))
            if self._told is not None:  # or a part of it
                self._port.app.api.sent(request, msgspec.structs.replace(self._told, error=InternalError()), 0)
            else:
                self._send_refusal(request, InternalError())
                left = True
        finally:
            if not left:
                self._transport.abort()

    def _answered(self, *, keep_alive: bool) -> None:
        """What follows a reply."""
        if self._made_room:
            self._reply_room, self._made_room = self._made_room, 0
            self._loop.call_soon(self._reply_taken)  # writing comes first, and may leave too much
        if not keep_alive:
            self._leave()
        elif self._ahead:
            self._answer_next(ahead=True)
        elif self._last_refusal is not None:
            self._send_refusal(*self._last_refusal)
        elif self._ended:
            self._leave()
        elif self._reading is _Reading.NOTHING:
            self._used = True
            self._idle_since = self._loop.time()
        if self._waits_for_leave and not self._ahead and (self._exchange is None or self._stream is not None):
            self._give_leave()

    def _abandon_upload(self) -> None:
        """An upload is answered before all of it is here: what still comes is thrown away, behind the reply."""
        self._stream = None
        self._ending = True
        self._pause()
        self._set_timer(_Reading.NOTHING)

    async def _open_file(
        self, request: HttpRequest, reply: HttpReply, path: Path
    ) -> tuple[HttpReply, _OpenFile | None]:
        """Opens the file of a reply, and takes room for a piece if that goes out; or makes the refusal in its place."""
        room = FILE_BYTES if sends_body(request, reply) else 0
        if not self._share.take(room):
            return refuse(BuffersFull(), request), None
        try:
            return reply, await asyncio.to_thread(_OpenFile, path)
        except FileNotFoundError:
            refusal: BertserveError = ObjectNotFound("the file has just been deleted")
        except OSError:
            refusal = NotReady("the file cannot be read now; try again", retry_after_s=1)
        self._share.give(room)
        return refuse(refusal, request), None

    async def _send_file(self, request: HttpRequest, reply: HttpReply, opened: _OpenFile, *, keep_alive: bool) -> None:
        api, sent = self._port.app.api, 0
        wanted = opened.size if sends_body(request, reply) else 0
        try:
            with opened.file:
                self._send(request, reply, opened.size, keep_alive=keep_alive)
                while sent < wanted:
                    piece = b""
                    with contextlib.suppress(OSError):
                        piece = await asyncio.to_thread(opened.file.read, min(wanted - sent, FILE_BYTES))
                    if not piece:
                        log.error(
                            "a file that is sent is shorter than it was", extra=fields(request_id=request.request_id)
                        )
                        reply = msgspec.structs.replace(reply, error=InternalError())
                        self._transport.abort()
                        break
                    sent += len(piece)
                    self._transport.write(piece)
                    if not self._writable.is_set():
                        await self._writable.wait()
        except asyncio.CancelledError:
            api.gone(request, reply, sent)
            raise
        if sends_body(request, reply):
            self._share.give(FILE_BYTES)
        api.sent(request, reply, sent)

    def _check_key(self) -> None:
        """Refuses a request without an API key, before anything shows whether there is such a route."""
        app, headers = self._port.app, self._headers
        keys = app.api.keys
        if keys is None:
            return
        method = self._parser.get_method().decode()
        if (error := unauthenticated(keys, app.public, method, self._path, headers)) is None:
            return
        if not app.origins or not is_preflight(method, headers) or announces_body(headers):
            raise self._violated(error)

    def _violated(self, error: BertserveError) -> BertserveError:
        """To be raised in a callback: it stops the parser, which then raises an error of its own."""
        self._violation = error
        return error

    def _check_head(self, version: str) -> None:
        """Version, framing and host, by RFC 9112, sections 2.3, 3.2 and 6.1.

        HTTP/1.0 needs no host: probes of load balancers send none.
        """
        headers = self._headers
        if self._old and b"close" in words(headers.get(b"connection", b"")):
            self._keep_alive = False  # whatever else it says: RFC 9112, 9.3
        if version not in {"1.0", "1.1"}:
            raise self._violated(
                MalformedRequest("the request's line names no version; HTTP/1.1 is spoken here")
                if version == "0.9"
                else VersionNotSpoken(f"HTTP/{version} is not spoken here as text; send HTTP/1.1")
            )
        if (coding := headers.get(b"transfer-encoding")) is not None:
            codings = words(coding)
            if version == "1.0" or codings.count(b"chunked") != 1 or codings[-1] != b"chunked":
                raise self._violated(MalformedRequest("Transfer-Encoding must be `chunked`, and only in HTTP/1.1"))
            if len(codings) > 1:
                raise self._violated(Unsupported("no Transfer-Encoding but `chunked` is read; use Content-Encoding"))
        self._check_host(headers.get(b"host"), version)

    def _check_host(self, host: bytes | None, version: str) -> None:
        if host is None:
            if version == "1.1":
                raise self._violated(MalformedRequest("the header Host is missing"))
        elif not _HOST.fullmatch(host):
            raise self._violated(MalformedRequest("the header Host is not a host with an optional port"))
        elif (names := self._port.hosts) is None or is_known_host(host, names):
            self._host = host
        elif self._path not in self._port.app.probes:
            raise self._violated(
                WrongHost(
                    "the header Host names another server: it is neither localhost, a loopback address nor one of"
                    " --allowed-hosts"
                )
            )

    def _maybe_continue(self) -> None:
        if b"100-continue" in words(self._headers[b"expect"]):
            self._waits_for_leave = True
            if self._exchange is None:
                self._give_leave()

    def _give_leave(self) -> None:
        """Lets the body come of a request that waits for that, once no reply is due before its own."""
        self._waits_for_leave = False
        if self._ending or self._ended:
            return
        if not self._body_bytes:
            self._transport.write(_CONTINUE)
        self._set_timer(_Reading.BODY)

    def _make_room(self) -> None:
        """A body has outgrown its room: takes more, within the body's limit and the budget."""
        if self._body_bytes > self._limits.body_bytes:
            raise self._violated(body_too_large(self._limits.body_bytes))
        room = min(self._limits.body_bytes, -(-self._body_bytes // _ROOM_BYTES) * _ROOM_BYTES)
        if not self._share.take(room - self._held):
            raise self._violated(BuffersFull())
        self._room = self._held = room

    def _forget_request(self) -> None:
        """Before and behind each request."""
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._header_lines = self._header_bytes = self._length = self._body_bytes = self._framing_bytes = 0
        self._room = self._limits.free_bytes
        self._held = 0
        self._waits_for_leave = False

    def _decline(self, rest: bytes | memoryview) -> None:
        """Reads on as HTTP/1.1 where the parser would leave off: no other protocol is spoken here (RFC 9110, 7.8).

        It skips the body of a request that offers one. Another parser reads that, behind a head that offers nothing.
        """
        if self._reading is _Reading.BODY:
            url, lines, size = self._url, self._header_lines, self._header_bytes
            chunked = b"transfer-encoding" in self._headers
            head = b"%b / HTTP/1.1\r\n%b%b\r\n" % (
                self._parser.get_method(),
                b"transfer-encoding: chunked\r\n" if chunked else b"content-length: %d\r\n" % self._length,
                b"" if self._keep_alive else b"connection: close\r\n",
            )
            self._parser = httptools.HttpRequestParser(self)
            self._again = True
            self._parser.feed_data(head)
            self._again = False
            self._url, self._header_lines, self._header_bytes = url, lines, size
        elif not self._keep_alive:
            self._ending = True
            return
        self._parse(rest)

    def _refuse_unparsed(self, error: httptools.HttpParserError) -> None:
        refusal = self._violation
        if isinstance(error, httptools.HttpParserInvalidURLError):
            self._url = self._url or b"?"  # where not a byte of it is taken: what comes before it is a method
            refusal = MalformedRequest("the request's target is not a path")
        elif refusal is None and isinstance(error, httptools.HttpParserCallbackError):
            log.error("a request could not be taken", exc_info=error)
            refusal = InternalError()
        self._refuse(refusal or MalformedRequest("the bytes received are not an HTTP/1.1 request"))

    def _refuse(self, error: BertserveError) -> None:
        """Answers an error in place of a handler, after the requests before it, and ends the connection."""
        self._ending = True
        self._violation = None
        error.bare()
        if self._stream is not None:  # it has a handler, which answers what this tells it
            self._stream.fail(error)
            self._abandon_upload()
            self._rest = memoryview(b"")
            return
        self._set_timer(_Reading.NOTHING)
        headers = self._headers
        path = (self._url or b"").split(b"?")[0].decode("ascii", "replace")
        method = self._parser.get_method().decode() if self._url else ""
        identity = request_id(headers.get(b"x-request-id"))
        request = HttpRequest(method, path, headers, b"", identity, time.perf_counter())
        request.route = self._port.app.route_of(path)
        self._share.give(self._held)
        self._forget_request()
        self._rest = memoryview(b"")
        if self._exchange is not None:
            self._last_refusal = request, error
        elif not self._transport.is_closing():
            self._send_refusal(request, error)

    def _send_refusal(self, request: HttpRequest, error: BertserveError) -> None:
        self._send(request, refuse(error, request), keep_alive=False)
        self._leave(_QUICK_LINGER_S if isinstance(error, SlowRequest) else _LINGER_S)

    def _end_idle(self) -> None:
        """Closes where nothing is under way: at once if the client has received all that was ever said."""
        if self._transport.can_write_eof() and not unsent_bytes(self._transport):
            self._idle_since = None
            self._transport.close()
        else:
            self._leave(_QUICK_LINGER_S)

    def _leave(self, linger_s: float = _LINGER_S) -> None:
        """Closes behind the last reply, so that the client can read it whatever it still sends."""
        self._ending = True
        self._idle_since = self._loop.time()
        self._rest = memoryview(b"")
        self._set_timer(_Reading.NOTHING)
        if self._farewell is None:
            self._farewell = Farewell(
                self._transport, quiet_s=linger_s, pace_s=self._limits.body_s, heard_all=self._ended
            )

    def _parse_target(self) -> None:
        url = self._url
        if url.startswith(b"/") and b"?" not in url and b"%" not in url and b"#" not in url:
            self._path, self._query = url.decode("latin-1"), b""
            return
        try:
            target = httptools.parse_url(url)
        except httptools.HttpParserInvalidURLError:
            raise self._violated(MalformedRequest("the request's target is not a path")) from None
        self._path = unquote_to_bytes(target.path or b"/").decode("utf-8", "replace")
        self._query = target.query or b""

    def _set_timer(self, reading: _Reading) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timed = reading
        if reading is not _Reading.NOTHING:
            seconds = self._limits.header_s if reading is _Reading.HEAD else self._limits.body_s
            self._timer = self._loop.call_later(seconds, guarded, self.abort, self._too_slow, reading, seconds)

    def _too_slow(self, reading: _Reading, seconds: float) -> None:
        if unread_bytes(self._transport) and not self._paused:
            self._timer = self._loop.call_later(_UNREAD_S, guarded, self.abort, self._too_slow, reading, seconds)
            return
        if not self._head_bytes and reading is _Reading.HEAD:
            self._end_idle()  # connected and never sent a byte
            return
        stream = self._stream
        if stream is not None and (self._paused or stream.total - self._streamed >= FREE_BYTES):
            self._streamed = stream.total
            self._set_timer(reading)
            return
        part = "headers" if reading is _Reading.HEAD else "body"
        flag = "--header-timeout-s" if reading is _Reading.HEAD else "--body-timeout-s"
        self._refuse(SlowRequest(f"the request's {part} did not arrive within {seconds:g} s ({flag})"))

    def _headers_too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(
            f"the request's line and headers exceed {self._limits.header_bytes} bytes (--header-limit-bytes)"
        )
