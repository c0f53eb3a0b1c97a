"""The application for other ASGI servers, such as uvicorn."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from bertserve.serving.errors import body_too_large
from bertserve.serving.http.exchange import NOT_MODIFIED, HttpRequest
from bertserve.serving.http.replies import head_lines, sends_body
from bertserve.serving.net.requests import gather_fields, request_id

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from bertserve.serving.http.app import App
    from bertserve.serving.http.exchange import HttpReply


class AsgiApp:
    """Answers the requests of an ASGI server: one HTTP request each call."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, headers = self._app, gather_fields(scope["headers"])
        identity = request_id(headers.get(b"x-request-id"))
        request = HttpRequest(scope["method"], scope["path"], headers, b"", identity, time.perf_counter())
        request.route = app.route_of(request.path)
        try:
            reply = await self._reply(request, receive)
            body = reply.body if sends_body(request, reply) else b""
            lines = [line.partition(b": ") for line in head_lines(app.origins, request, reply).splitlines()]
            # A 304 may state the length of the omitted body, but other servers would wait for that body.
            omitted = b"content-length" if reply.status == NOT_MODIFIED else None
            fields = [(name, value) for name, _, value in lines if name != omitted]
            await send({"type": "http.response.start", "status": reply.status, "headers": fields})
            await send({"type": "http.response.body", "body": body})
        except asyncio.CancelledError:
            app.gone(request)
            raise
        app.sent(request, reply, len(body))

    async def _reply(self, request: HttpRequest, receive: Receive) -> HttpReply:
        app, limit, body, more = self._app, self._app.context.settings.body_limit_bytes, bytearray(), True
        if (error := app.unauthenticated(request.method, request.path, request.headers)) is not None:
            return app.refuse(error, request)
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > limit:
                return app.refuse(body_too_large(limit), request)
        request.body, request.arrival = bytes(body), time.perf_counter()
        return await app.answer(request)
