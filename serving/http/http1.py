"""HTTP/1.1 request parsing: bytes in, requests or an error out. httptools parses; this module checks and limits.

Limits: header bytes and lines (431), body bytes (413), and the bytes that all connections hold (503).
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import httptools

from bertserve.serving.errors import (
    BertserveError,
    BodyTooLarge,
    BuffersFull,
    HeadersTooLarge,
    InternalError,
    MalformedRequest,
    Unsupported,
    VersionNotSpoken,
    WrongHost,
    body_too_large,
)
from bertserve.serving.http.exchange import HttpRequest
from bertserve.serving.http.hosts import is_known_host
from bertserve.serving.net.requests import MAX_HEADER_BYTES, MAX_HEADERS, combine, request_id, words

if TYPE_CHECKING:
    from bertserve.serving.http.port import HttpPort
    from bertserve.serving.net.buffers import BufferShare

log = logging.getLogger("bertserve.http")

_FRAMING_BYTES = 6 * 65_536
"""Bytes that chunked framing may add to a body: 65,536 chunks of the smallest kind."""

_PIECES = 256
"""Maximum pieces of a body: one-byte pieces would take 60 times their size, and long to join."""

_ROOM_BYTES = 65_536
"""Step in which a body's buffer space grows, in bytes."""

_HOST = re.compile(rb"(\[[\w:.~!$&'()*+,;=%-]+\]|[\w.~!$&'()*+,;=%-]*)(:[0-9]*)?")
"""RFC 3986, section 3.2, without user information."""

_PLAIN_PATH = re.compile(rb"/[^?%#]*")


class Reading(IntEnum):
    """The part of a request that a connection receives next."""

    NOTHING = auto()
    """A head, which may never come."""
    HEAD = auto()
    PERMISSION = auto()
    """A body whose client waits for `100 Continue` before it sends."""
    BODY = auto()
    OVER = auto()
    """No request follows, and further input is not parsed."""


# Python 3.11 takes 0.1 us to look up a member in its class, and a request does so ten times.
_NOTHING, _HEAD, _PERMISSION, _BODY, _OVER = Reading


class RequestParser:
    """Parses the requests of one connection.

    Attributes:
        requests: Received requests, oldest first. The connection takes them. One that breaks a rule is the last.
        reading: The part that comes next.
        http_1_0: Whether the last head was one of HTTP/1.0.
        body_bytes: Received bytes of the current body.
        framing_bytes: Other bytes received with the body.
        length: The body's Content-Length; 0 without one.
    """

    # As in the connection: without slots each attribute would be looked up in a dictionary.
    __slots__ = (
        *("_body", "_head_bytes", "_header_bytes", "_header_lines", "_host", "_keep_alive", "_parser", "_port"),
        *("_request", "_share", "_url"),
        *("body_bytes", "framing_bytes", "http_1_0", "length", "reading", "requests"),
    )

    def __init__(self, port: HttpPort[Any], share: BufferShare) -> None:
        self._port = port
        self._share = share
        self._parser = httptools.HttpRequestParser(self)
        self.requests: deque[HttpRequest] = deque()
        self.reading = _HEAD
        self.http_1_0 = False
        self._head_bytes = 0  # of an incomplete head
        self._host = b"/"  # the last valid and allowed Host; this one is never valid
        self._keep_alive = True
        self._body: list[bytes] = []
        self._expect_request()

    def feed(self, data: bytes | memoryview) -> None:
        """Parses bytes."""
        if self.reading >= _PERMISSION:
            self.framing_bytes += len(data)
        else:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            rest = data[offer.args[0] :]
        except httptools.HttpParserError as error:
            if self.reading is not _OVER:
                self.reject(self._reason(error))
            return
        else:
            if self.framing_bytes > MAX_HEADER_BYTES + _FRAMING_BYTES:
                self.reject(BodyTooLarge("the chunks of the body are too small; send larger chunks"))
            elif self.reading is _HEAD:
                if self._head_bytes == 1:
                    self._head_bytes = self._begun_bytes(bytes(data))
                if self._head_bytes > MAX_HEADER_BYTES:
                    self.reject(_headers_too_large())
            return
        self._decline(rest)

    def reject(self, error: BertserveError) -> None:
        """Ends the parsing with a request that carries an error: the received part of one, without its body."""
        request = self._request
        request.method = self._parser.get_method().decode() if self._url else ""
        request.path = self._url.split(b"?")[0].decode("ascii", "replace")
        request.request_id = request_id(request.headers.get(b"x-request-id"))
        request.arrival = time.perf_counter()
        request.route = self._port.app.route_of(request.path)
        request.rejection = error.without_traceback()
        self._share.give(request.held)
        request.held = 0
        self.requests.append(request)
        self.reading = _OVER
        self._expect_request()

    def close(self) -> None:
        """Drops references to this object, after the connection has ended."""
        del self._parser
        self.requests.clear()
        self._expect_request()

    # Callbacks of the parser. The errors that they raise are the context of the parser's own.

    def on_message_begin(self) -> None:
        if self.reading >= _PERMISSION:
            return  # the head that `_decline` repeats
        self.reading = _HEAD
        self._head_bytes = self._head_bytes or 1  # the piece ended the previous request; see `_begun_bytes`

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._header_bytes += len(url)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise _headers_too_large()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts header lines and their bytes, including trailers, which no handler sees."""
        self._header_lines += 1
        self._header_bytes += len(name) + len(value) + 4
        if self._header_lines > MAX_HEADERS:
            raise HeadersTooLarge(f"more than {MAX_HEADERS} headers")
        if self._header_bytes > MAX_HEADER_BYTES:
            raise _headers_too_large()
        if self.reading is _HEAD:
            headers, name = self._request.headers, name.lower()
            headers[name] = combine(name, headers[name], value) if name in headers else value

    def on_headers_complete(self) -> None:
        """Checks the head, including the API key, before any byte of the body is buffered."""
        if self.reading is not _HEAD:
            return
        parser, request = self._parser, self._request
        headers = request.headers
        request.method = parser.get_method().decode()
        self._keep_alive = parser.should_keep_alive()
        version = "1.1"
        if not self._keep_alive or b"connection" in headers:  # else 1.1, with keep-alive by default
            version = parser.get_http_version()
        self.http_1_0 = request.http_1_0 = version == "1.0"
        request.path = self._url.decode("latin-1") if _PLAIN_PATH.fullmatch(self._url) else self._parse_target()
        if version != "1.1" or b"transfer-encoding" in headers or headers.get(b"host") != self._host:
            self._check_head(version)
        self._check_key()
        self.length = int(headers.get(b"content-length", b"0"))
        if self.length > self._port.settings.body_limit_bytes:
            raise body_too_large(self._port.settings.body_limit_bytes)
        self._head_bytes = 0
        waits = b"expect" in headers and version == "1.1" and b"100-continue" in words(headers[b"expect"])
        self.reading = _PERMISSION if waits else _BODY

    def on_body(self, body: bytes) -> None:
        self.reading = _BODY
        self.body_bytes += len(body)
        self.framing_bytes -= len(body)
        if self.body_bytes > self._port.free_bytes:
            self._make_room()
        self._body.append(body)
        if len(self._body) > _PIECES:
            self._body[:] = [b"".join(self._body)]

    def on_message_complete(self) -> None:
        parser, request, body = self._parser, self._request, self._body
        if parser.should_upgrade():
            if parser.get_method() == b"CONNECT":
                self._keep_alive = False  # the following bytes are not HTTP
            elif self.length or b"transfer-encoding" in request.headers:
                return  # `_decline` reads its body
        if request.held:
            self._share.give(request.held - self.body_bytes)
            request.held = self.body_bytes
        request.body = body[0] if len(body) == 1 else b"".join(body)
        request.request_id = request_id(request.headers.get(b"x-request-id"))
        request.arrival = time.perf_counter()
        self.requests.append(request)
        self.reading = _NOTHING if self._keep_alive else _OVER
        self._expect_request()

    def _check_key(self) -> None:
        """Rejects a request without an API key, before anything reveals whether the route exists."""
        request = self._request
        error = self._port.app.unauthenticated(request.method, request.path, request.headers)
        if error is not None:
            raise error

    def _check_head(self, version: str) -> None:
        """Checks version, framing and host by RFC 9112, sections 2.3, 3.2 and 6.1.

        HTTP/1.0 needs no host: probes of load balancers send none.
        """
        headers = self._request.headers
        if self.http_1_0 and b"close" in words(headers.get(b"connection", b"")):
            self._keep_alive = False  # takes precedence: RFC 9112, 9.3
        if version == "0.9":
            raise MalformedRequest("the request line has no HTTP version; send HTTP/1.1")
        if version not in {"1.0", "1.1"}:
            raise VersionNotSpoken(f"HTTP/{version} is not supported in plain text; send HTTP/1.1")
        if (coding := headers.get(b"transfer-encoding")) is not None:
            codings = words(coding)
            if version == "1.0" or codings.count(b"chunked") != 1 or codings[-1] != b"chunked":
                raise MalformedRequest("Transfer-Encoding must be `chunked`, and only in HTTP/1.1")
            if len(codings) > 1:
                raise Unsupported("the only supported Transfer-Encoding is `chunked`; use Content-Encoding")
        self._check_host(headers.get(b"host"), version)

    def _check_host(self, host: bytes | None, version: str) -> None:
        if host is None:
            if version == "1.1":
                raise MalformedRequest("the header Host is missing")
        elif not _HOST.fullmatch(host):
            raise MalformedRequest("the header Host is not a host with an optional port")
        elif (names := self._port.hosts) is None or is_known_host(host, names):
            self._host = host
        elif self._request.path not in self._port.app.probes:
            raise WrongHost(
                "the host is not allowed: use localhost or a loopback address, or start the server with its name in"
                " --allowed-hosts"
            )

    def _make_room(self) -> None:
        """Grows the body's buffer space, within the body limit and the budget."""
        request, limit = self._request, self._port.settings.body_limit_bytes
        if self.body_bytes > limit:
            raise body_too_large(limit)
        if self.body_bytes > request.held:
            room = min(limit, -(-self.body_bytes // _ROOM_BYTES) * _ROOM_BYTES)
            if not self._share.take(room - request.held):
                raise BuffersFull
            request.held = room

    def _expect_request(self) -> None:
        self._url = b""
        self._request = HttpRequest("", "", {}, b"", "", 0.0, self._share)
        self._body.clear()
        self._head_bytes = self._header_lines = self._header_bytes = 0
        self.length = self.body_bytes = self.framing_bytes = 0

    def _begun_bytes(self, data: bytes) -> int:
        """The size of a head that began behind a request in the same piece. The parser does not tell where."""
        line = b"%b %b" % (self._parser.get_method(), self._url) if self._url else b""
        begin = data.rfind(line)
        return 1 if not line or begin < 0 else len(data) - begin

    def _decline(self, rest: bytes | memoryview) -> None:
        """Continues in HTTP/1.1 after an offer to upgrade, where the parser stops (RFC 9110, 7.8).

        No upgrade is supported. The parser skips the body of a request with such an offer, so a new parser reads the
        body, after a head without the offer.
        """
        if self.reading in {_PERMISSION, _BODY}:
            url, lines, size = self._url, self._header_lines, self._header_bytes
            chunked = b"transfer-encoding" in self._request.headers
            head = b"%b / HTTP/1.1\r\n%b%b\r\n" % (
                self._parser.get_method(),
                b"transfer-encoding: chunked\r\n" if chunked else b"content-length: %d\r\n" % self.length,
                b"" if self._keep_alive else b"connection: close\r\n",
            )
            self._parser = httptools.HttpRequestParser(self)
            self._parser.feed_data(head)
            self._url, self._header_lines, self._header_bytes = url, lines, size
        if self.reading is not _OVER:
            self.feed(rest)

    def _reason(self, error: httptools.HttpParserError) -> BertserveError:
        violation = error.__context__
        if isinstance(violation, BertserveError):
            return violation
        if isinstance(error, httptools.HttpParserInvalidURLError):
            self._url = self._url or b"?"  # if the parser took none of it: the method was valid
            return MalformedRequest("the request target is not a path")
        if isinstance(error, httptools.HttpParserCallbackError):
            log.error("cannot handle a request", exc_info=error)
            return InternalError()
        return MalformedRequest("the bytes received are not an HTTP/1.1 request")

    def _parse_target(self) -> str:
        """The decoded path of a target that is not a plain path."""
        try:
            target = httptools.parse_url(self._url)
        except httptools.HttpParserInvalidURLError:
            raise MalformedRequest("the request target is not a path") from None
        if target.host is not None:
            self._replace_host(target)
        return unquote_to_bytes(target.path or b"/").decode("utf-8", "replace")

    def _replace_host(self, target: Any) -> None:  # noqa: ANN401  httptools' URL
        """Puts the host of a target in absolute form in the place of a valid Host (RFC 9112, 3.2.2)."""
        headers = self._request.headers
        if _HOST.fullmatch(headers.get(b"host", b"" if self.http_1_0 else b"/")):
            host = b"[%b]" % target.host if b":" in target.host else target.host
            headers[b"host"] = host if target.port is None else b"%b:%d" % (host, target.port)


def _headers_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"the request line and headers exceed {MAX_HEADER_BYTES} bytes")
