"""Converts between ASGI messages and our records, for other ASGI servers and for our own connection."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from bertserve.serving.errors import BodyTooLarge, InternalError, setting_of
from bertserve.serving.http.app_context import refuse
from bertserve.serving.http.exchange import NOT_MODIFIED, HttpReply, HttpRequest
from bertserve.serving.http.replies import head_lines, sends_body
from bertserve.serving.logs import fields
from bertserve.serving.net.requests import gathered, request_id

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from bertserve.serving.http.app_context import AppContext

log = logging.getLogger("bertserve.http")

_REQUEST = "bertserve.request"
"""Scope key of the request that our own connection has parsed."""

_REPLY = "bertserve.reply"
"""Type of the message that carries a reply to our own connection."""


async def read_request(request: Request, body_limit: int) -> HttpRequest:
    """The whole request: as our own connection parsed it, or read from another server.

    Raises:
        BodyTooLarge: The body exceeds `body_limit`.
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


def head_of(scope: Scope) -> HttpRequest:
    """The request without its body; with its body if our own connection has parsed it."""
    ready = scope.get(_REQUEST)
    if isinstance(ready, HttpRequest):
        return ready
    headers = headers_of(scope)
    identity = request_id(headers.get(b"x-request-id"))
    request = HttpRequest(scope["method"], scope["path"], headers, b"", identity, time.perf_counter())
    request.route = scope["app"].route_of(request.path)
    return request


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """A request's headers by lower-case name; repeated headers are joined."""
    return gathered(scope["headers"])


def body_too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body exceeds {limit} bytes{setting_of(limit)}")


class AsgiReply(Response):
    """A reply as ASGI messages. Our own connection gets the record itself, and writes and records it."""

    def __init__(self, context: AppContext, reply: HttpReply, request: HttpRequest) -> None:
        super().__init__(b"", reply.status)
        self._context, self._reply, self._request = context, reply, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  ASGI's
        if _REQUEST in scope:
            await send({"type": _REPLY, "reply": self._reply})
            return
        context, reply, request = self._context, self._reply, self._request
        body = reply.body if sends_body(request, reply) else b""
        # A 304 may state the length of the omitted body, but other servers would wait for that body.
        states_length = reply.status != NOT_MODIFIED
        lines = head_lines(scope["app"].origins, request, reply, states_length=states_length).splitlines()
        headers = [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        try:
            await send({"type": "http.response.body", "body": body})
        except asyncio.CancelledError:
            context.gone(request)
            raise
        context.sent(request, reply, len(body))


async def call_app(app: ASGIApp, request: HttpRequest, scheme: str, client: tuple[str, int] | None) -> HttpReply:
    """Runs the application on a request that our own connection has parsed."""
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": scheme,
        "path": request.path,
        "query_string": b"",  # no endpoint reads it
        "root_path": "",
        "headers": list(request.headers.items()),
        "client": client,
        "server": None,
        _REQUEST: request,
    }
    replies: list[HttpReply] = []
    incoming: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        # The task is cancelled if the client disconnects.
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: Message) -> None:
        if message["type"] == _REPLY:
            replies.append(message["reply"])

    try:
        await app(scope, receive, send)
        return replies[0]
    except Exception:  # the HTTP boundary, for exceptions of the framework
        log.exception("a request failed", extra=fields(request_id=request.request_id))
        return refuse(InternalError(), request)
