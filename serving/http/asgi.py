"""Between ASGI's messages and our records, both ways: for servers that run the application, ours among them."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from serving.errors import BodyTooLarge, InternalError
from serving.http.exchange import JSON, NOT_MODIFIED, HttpReply, HttpRequest
from serving.logs import fields
from serving.net.requests import gathered, request_id

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from serving.http.api import Api

log = logging.getLogger("bertserve.http")

_REQUEST = "bertserve.request"
"""In the scope, where our own connection has read the request."""

_PATHSEND = "http.response.pathsend"

FILE_BYTES = 262_144
"""A file is read and sent by so much at a time."""

_OURS = (b"content-type", b"content-length", b"x-request-id")
"""Headers that a connection writes itself."""


async def read_request(request: Request, body_limit: int) -> HttpRequest:
    """The request whole, as our own connection has read it or as another server brings it.

    Args:
        request: The request as ASGI has it.
        body_limit: Bytes that its body may have.

    Raises:
        BodyTooLarge: It has more.
    """
    http = head_of(request.scope)
    if http is not request.scope.get(_REQUEST):
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > body_limit:
                raise body_too_large(body_limit)
        http.body, http.arrival = bytes(body), time.perf_counter()
    return http


class _Stream:
    """The body of a request that another server brings."""

    def __init__(self, request: Request) -> None:
        self._pieces = request.stream()

    async def read(self) -> bytes:
        async for piece in self._pieces:
            if piece:
                return piece
        return b""


def stream_request(request: Request) -> HttpRequest:
    """The request with a body that is still to be read."""
    http = head_of(request.scope)
    if http is not request.scope.get(_REQUEST):
        http.stream = _Stream(request)
    return http


def head_of(scope: Scope) -> HttpRequest:
    """The request without its body, or whole where our own connection has read it."""
    ready = scope.get(_REQUEST)
    if isinstance(ready, HttpRequest):
        return ready
    headers = headers_of(scope)
    identity = request_id(headers.get(b"x-request-id"))
    query = scope["query_string"]
    return HttpRequest(scope["method"], scope["path"], headers, b"", identity, time.perf_counter(), query)


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """A request's headers by lower-case name; what came on several lines is joined."""
    return gathered(scope["headers"])


def body_too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body exceeds {limit} bytes")


class _File(Response):
    """A reply whose body is a file; our own connection sends it itself (ASGI's extension `http.response.pathsend`)."""

    def __init__(self, path: Path, status: int) -> None:
        super().__init__(b"", status)
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  ASGI's
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        if _PATHSEND in scope.get("extensions", {}):
            await send(start)
            await send({"type": _PATHSEND, "path": str(self._path)})
            return
        with await asyncio.to_thread(self._path.open, "rb") as file:
            self.headers["content-length"] = str(os.fstat(file.fileno()).st_size)
            await send(start)
            while piece := await asyncio.to_thread(file.read, FILE_BYTES):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def response_of(reply: HttpReply, request: HttpRequest, scope: Scope) -> Response:
    # A 304 has no body. Our own connection says the length of what it leaves out; other servers would send it.
    bodiless = reply.status == NOT_MODIFIED and _REQUEST not in scope
    response = (
        Response(b"" if bodiless else reply.body, reply.status)
        if reply.file is None
        else _File(reply.file, reply.status)
    )
    response.raw_headers += [
        (b"content-type", reply.content_type),
        (b"x-request-id", request.request_id.encode()),
        *[(name, value) for name, _, value in (line.partition(b": ") for line in reply.head.splitlines())],
    ]
    return response


async def call_app(
    app: ASGIApp, api: Api, request: HttpRequest, scheme: str, client: tuple[str, int] | None
) -> HttpReply:
    """Has the application answer a request that our own connection has read.

    Args:
        app: The application.
        api: What its endpoints work with.
        request: The request.
        scheme: `http` or `https`.
        client: Its address.
    """
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": scheme,
        "path": request.path,
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers.items()),
        "client": client,
        "server": None,
        "extensions": {_PATHSEND: {}},
        _REQUEST: request,
    }
    reply = HttpReply(b"")
    pieces: list[bytes] = []
    incoming: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        # A client that goes cancels this.
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            headers = dict(message["headers"])
            reply.content_type = headers.get(b"content-type", JSON)
            reply.head = header_lines(pair for pair in message["headers"] if pair[0].lower() not in _OURS)
        elif message["type"] == _PATHSEND:
            reply.file = Path(message["path"])
        else:
            pieces.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # the HTTP boundary, for what the framework raises itself
        log.exception("a request failed", extra=fields(request_id=request.request_id))
        return api.refuse(InternalError(), request)
    reply.body = b"".join(pieces)
    return reply


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%b: %b\r\n" % pair for pair in headers])
