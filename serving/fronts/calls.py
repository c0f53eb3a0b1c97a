"""Answers the requests that fronts pass on, because only the core process knows the answer."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from bertserve.serving.fronts.wire import Replied
from bertserve.serving.grpc.calls import Method
from bertserve.serving.http.exchange import HttpRequest, ignored_head

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bertserve.serving.errors import BertserveError
    from bertserve.serving.fronts.pool import FrontPool
    from bertserve.serving.fronts.wire import Called
    from bertserve.serving.grpc.calls import Metadata
    from bertserve.serving.http.app import App


class _Call:
    """The part of `grpc.calls.Call` that these methods use."""

    metadata: Metadata = ()

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self.metadata = metadata


class Calls:
    """The routes and methods that fronts pass on."""

    def __init__(self, app: App, methods: Mapping[str, Method | BertserveError], pool: FrontPool) -> None:
        self._context = replace(app.context, gather=None)  # `answer` has gathered
        self._routes = {(route.method, route.path): route.endpoint for route in app.routes if route.of_core}
        self._methods = {path: method for path, method in methods.items() if isinstance(method, Method)}
        self._pool = pool

    async def answer(self, called: Called) -> Replied:
        """Answers a call. If it changes the models, all fronts serve them before it is answered.

        Raises:
            BertserveError: As the endpoint or the method does.
        """
        before = self._pool.revision
        await self._pool.gather()
        method = self._methods.get(called.route)
        if method is not None and method.unary is not None:
            call = _Call()
            message = await method.unary(method.kind.FromString(called.body), call)
            replied = Replied(message.SerializeToString(), metadata=call.metadata)
        else:
            replied = await self._answer_http(called)
        if self._pool.revision != before:
            await self._pool.follow()
        return replied

    async def _answer_http(self, called: Called) -> Replied:
        http = HttpRequest(
            method=called.method,
            path=called.path,
            headers={name.encode("latin-1"): value.encode("latin-1") for name, value in called.headers.items()},
            body=called.body,
            request_id=called.request_id,
            arrival=time.perf_counter(),
            parameters=called.parameters,
        )
        reply = await self._routes[called.method, called.route](self._context, http)
        head = reply.head + ignored_head(http.ignored) if http.ignored else reply.head
        return Replied(reply.body, reply.status, reply.content_type, head)
