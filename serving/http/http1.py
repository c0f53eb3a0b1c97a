"""HTTP/1.1 request parsing: bytes in, requests or an error out. httptools parses; this module checks and limits.

Limits: header bytes and lines (431), body bytes (413), and the bytes that all connections hold (503).
"""

from __future__ import annotations

import logging
import re
import time
from enum import Enum, auto
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
from bertserve.serving.net.requests import MAX_HEADER_BYTES, MAX_HEADERS, combined, request_id, words

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


class Reading(Enum):
    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class RequestParser:
    """Parses the requests of one connection.

    Attributes:
        requests: Complete requests, each with whether the connection stays open after it. The connection takes them.
        reading: The part that comes next; a head that has not begun may never come.
        head_bytes: Received bytes of an incomplete head.
        body_bytes: Received bytes of the current body.
        framing_bytes: Other bytes received with the body.
        length: The body's Content-Length; 0 without one.
        awaits_leave: Whether the client waits for `100 Continue` before it sends the body.
        over: Whether no more requests follow.
    """

    # As in the connection: without slots each attribute would be looked up in a dictionary.
    __slots__ = (
        *("_again", "_body", "_header_bytes", "_header_lines", "_headers", "_held", "_host", "_keep_alive"),
        *("_old", "_parser", "_path", "_port", "_room"),
        *("_settings", "_share", "_url", "_violation"),
        *("awaits_leave", "body_bytes", "framing_bytes", "head_bytes", "length", "over", "reading", "requests"),
    )

    def __init__(self, port: HttpPort[Any], share: BufferShare) -> None:
        self._port = port
        self._settings = port.settings
        self._share = share
        self._parser = httptools.HttpRequestParser(self)
        self.requests: list[tuple[HttpRequest, bool]] = []
        self.reading = Reading.HEAD
        self.head_bytes = 0
        self.over = False
        self._again = False  # a head is parsed a second time
        self._old = False  # HTTP/1.0
        self._path = ""
        self._host = b"/"  # the last valid and allowed Host; this one is never valid
        self._keep_alive = True
        self._violation: BertserveError | None = None
        self._held = 0
        self._forget_request()

    def feed(self, data: bytes | memoryview) -> BertserveError | None:
        """Parses bytes; returns the error that ends the connection after the earlier requests, if any."""
        if self.reading is Reading.BODY:
            self.framing_bytes += len(data)
        else:
            self.head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            return self._decline(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            return self._refusal(error)
        if self.framing_bytes > MAX_HEADER_BYTES + _FRAMING_BYTES:
            return BodyTooLarge("the chunks of the body are too small; send larger chunks")
        if self.reading is Reading.HEAD:
            if self.head_bytes == 1:
                self.head_bytes = self._begun_bytes(bytes(data))
            if self.head_bytes > MAX_HEADER_BYTES:
                return self._headers_too_large()
        return None

    def partial_request(self) -> HttpRequest:
        """The received part of a request that is rejected; its body is dropped."""
        headers = self._headers
        path = (self._url or b"").split(b"?")[0].decode("ascii", "replace")
        method = self._parser.get_method().decode() if self._url else ""
        request = HttpRequest(
            *(method, path, headers, b"", request_id(headers.get(b"x-request-id")), time.perf_counter())
        )
        request.route = self._port.app.route_of(path)
        self._share.give(self._held)
        self._forget_request()
        return request

    def close(self) -> None:
        """Drops references to this object, after the connection has ended."""
        del self._parser
        self._forget_request()

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        if self._again:
            return
        self.reading = Reading.HEAD
        self.head_bytes = self.head_bytes or 1  # the piece ended the previous request; see `_begun_bytes`

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._header_bytes += len(url)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise self._violated(self._headers_too_large())

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts header lines and their bytes, including trailers, which no handler sees."""
        self._header_lines += 1
        self._header_bytes += len(name) + len(value) + 4
        if self._header_lines > MAX_HEADERS:
            raise self._violated(HeadersTooLarge(f"more than {MAX_HEADERS} headers"))
        if self._header_bytes > MAX_HEADER_BYTES:
            raise self._violated(self._headers_too_large())
        if self.reading is Reading.HEAD:
            name = name.lower()
            if name in self._headers:
                try:
                    value = combined(name, self._headers[name], value)
                except MalformedRequest as error:
                    raise self._violated(error) from None
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        """Checks the head, including the API key, before any byte of the body is buffered."""
        if self._again:
            return
        headers = self._headers
        self._keep_alive = self._parser.should_keep_alive()
        version = "1.1"
        if not self._keep_alive or b"connection" in headers:  # else 1.1, with keep-alive by default
            version = self._parser.get_http_version()
        self._old = version == "1.0"
        self._parse_target()
        if version != "1.1" or b"transfer-encoding" in headers or headers.get(b"host") != self._host:
            self._check_head(version)
        self._check_key()
        self.length = int(headers.get(b"content-length", b"0"))
        if self.length > self._settings.body_limit_bytes:
            raise self._violated(body_too_large(self._settings.body_limit_bytes))
        self.head_bytes = 0
        self.reading = Reading.BODY
        if b"expect" in headers and version == "1.1":
            self.awaits_leave = b"100-continue" in words(headers[b"expect"])

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        self.framing_bytes -= len(body)
        if self.body_bytes > self._room:
            self._make_room()
        self._body.append(body)
        if len(self._body) > _PIECES:
            self._body[:] = [b"".join(self._body)]

    def on_message_complete(self) -> None:
        """Queues the complete request for its answer, after earlier ones."""
        if self._parser.should_upgrade():
            if self._parser.get_method() == b"CONNECT":
                self._keep_alive = False  # the following bytes are not HTTP
            elif self.length or b"transfer-encoding" in self._headers:
                return  # `_decline` reads its body
        self.reading = Reading.NOTHING
        self.head_bytes = 0
        parser, headers, body = self._parser, self._headers, self._body
        if self._held:
            self._share.give(self._held - self.body_bytes)
            self._held = self.body_bytes
        identity = request_id(headers.get(b"x-request-id"))
        content = body[0] if len(body) == 1 else b"".join(body)
        request = HttpRequest(
            *(parser.get_method().decode(), self._path, headers, content, identity),
            *(time.perf_counter(), self._share, self._held),
        )
        request.http_1_0 = self._old
        self._forget_request()
        self.requests.append((request, self._keep_alive))

    def _check_key(self) -> None:
        """Rejects a request without an API key, before anything reveals whether the route exists."""
        app = self._port.app
        if app.context.keys is None:
            return
        method = self._parser.get_method().decode()
        if (error := app.unauthenticated(method, self._path, self._headers)) is not None:
            raise self._violated(error)

    def _violated(self, error: BertserveError) -> BertserveError:
        """Records an error to raise in a callback. The parser then stops and raises its own error."""
        self._violation = error
        return error

    def _check_head(self, version: str) -> None:
        """Checks version, framing and host by RFC 9112, sections 2.3, 3.2 and 6.1.

        HTTP/1.0 needs no host: probes of load balancers send none.
        """
        headers = self._headers
        if self._old and b"close" in words(headers.get(b"connection", b"")):
            self._keep_alive = False  # takes precedence: RFC 9112, 9.3
        if version not in {"1.0", "1.1"}:
            raise self._violated(
                MalformedRequest("the request line has no HTTP version; send HTTP/1.1")
                if version == "0.9"
                else VersionNotSpoken(f"HTTP/{version} is not supported in plain text; send HTTP/1.1")
            )
        if (coding := headers.get(b"transfer-encoding")) is not None:
            codings = words(coding)
            if version == "1.0" or codings.count(b"chunked") != 1 or codings[-1] != b"chunked":
                raise self._violated(MalformedRequest("Transfer-Encoding must be `chunked`, and only in HTTP/1.1"))
            if len(codings) > 1:
                raise self._violated(
                    Unsupported("the only supported Transfer-Encoding is `chunked`; use Content-Encoding")
                )
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
                    "the host is not allowed: use localhost or a loopback address, or start the server with its name in"
                    " --allowed-hosts"
                )
            )

    def _make_room(self) -> None:
        """Grows the body's buffer space, within the body limit and the budget."""
        if self.body_bytes > self._settings.body_limit_bytes:
            raise self._violated(body_too_large(self._settings.body_limit_bytes))
        room = min(self._settings.body_limit_bytes, -(-self.body_bytes // _ROOM_BYTES) * _ROOM_BYTES)
        if not self._share.take(room - self._held):
            raise self._violated(BuffersFull())
        self._room = self._held = room

    def _forget_request(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._header_lines = self._header_bytes = self.length = self.body_bytes = self.framing_bytes = 0
        self._room = self._port.free_bytes
        self._held = 0
        self.awaits_leave = False

    def _begun_bytes(self, data: bytes) -> int:
        """The size of a head that began behind a request in the same piece. The parser does not tell where."""
        line = b"%b %b" % (self._parser.get_method(), self._url) if self._url else b""
        begin = data.rfind(line)
        return 1 if not line or begin < 0 else len(data) - begin

    def _decline(self, rest: bytes | memoryview) -> BertserveError | None:
        """Continues in HTTP/1.1 after an offer to upgrade, where the parser stops (RFC 9110, 7.8).

        No upgrade is supported. The parser skips the body of a request with such an offer, so a new parser reads the
        body, after a head without the offer.
        """
        if self.reading is Reading.BODY:
            url, lines, size = self._url, self._header_lines, self._header_bytes
            chunked = b"transfer-encoding" in self._headers
            head = b"%b / HTTP/1.1\r\n%b%b\r\n" % (
                self._parser.get_method(),
                b"transfer-encoding: chunked\r\n" if chunked else b"content-length: %d\r\n" % self.length,
                b"" if self._keep_alive else b"connection: close\r\n",
            )
            self._parser = httptools.HttpRequestParser(self)
            self._again = True
            self._parser.feed_data(head)
            self._again = False
            self._url, self._header_lines, self._header_bytes = url, lines, size
        elif not self._keep_alive:
            self.over = True
            return None
        return self.feed(rest)

    def _refusal(self, error: httptools.HttpParserError) -> BertserveError:
        violation, self._violation = self._violation, None
        if isinstance(error, httptools.HttpParserInvalidURLError):
            self._url = self._url or b"?"  # if the parser took none of it: the method was valid
            return MalformedRequest("the request target is not a path")
        if violation is None and isinstance(error, httptools.HttpParserCallbackError):
            log.error("cannot handle a request", exc_info=error)
            return InternalError()
        return violation or MalformedRequest("the bytes received are not an HTTP/1.1 request")

    def _parse_target(self) -> None:
        url = self._url
        if url.startswith(b"/") and b"?" not in url and b"%" not in url and b"#" not in url:
            self._path = url.decode("latin-1")
            return
        try:
            target = httptools.parse_url(url)
        except httptools.HttpParserInvalidURLError:
            raise self._violated(MalformedRequest("the request target is not a path")) from None
        self._path = unquote_to_bytes(target.path or b"/").decode("utf-8", "replace")
        if target.host is not None:
            self._replace_host(target)

    def _replace_host(self, target: Any) -> None:  # noqa: ANN401  httptools' URL
        """Puts the host of a target in absolute form in the place of a valid Host (RFC 9112, 3.2.2)."""
        if _HOST.fullmatch(self._headers.get(b"host", b"" if self._old else b"/")):
            host = b"[%b]" % target.host if b":" in target.host else target.host
            self._headers[b"host"] = host if target.port is None else b"%b:%d" % (host, target.port)

    def _headers_too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(f"the request line and headers exceed {MAX_HEADER_BYTES} bytes")
