"""The application of an HTTP port: finds the route of a request, and is the error boundary around its endpoint."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any

from bertserve.serving.errors import (
    BertserveError,
    ClientGone,
    InternalError,
    MethodNotAllowed,
    NotReady,
    route_not_found,
)
from bertserve.serving.http.apis import cohere, console_page, huggingface, oip, openai, operations, tei
from bertserve.serving.http.cors import PREFLIGHT, is_preflight
from bertserve.serving.http.exchange import NO_ROUTE, HttpReply
from bertserve.serving.http.faults import OWN
from bertserve.serving.http.near_paths import KnownPaths
from bertserve.serving.http.openapi import docs_router, document
from bertserve.serving.http.routes import Router, RouteTable
from bertserve.serving.inference.requests import RequestTrace
from bertserve.serving.logs import fields
from bertserve.serving.security.keys import refusal
from bertserve.serving.unawaited import is_cancelled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.serving.errors import Unauthenticated
    from bertserve.serving.http.app_context import AppContext, Endpoint
    from bertserve.serving.http.exchange import HttpRequest
    from bertserve.serving.http.faults import ErrorFormat
    from bertserve.serving.net.observer import RequestObserver

log = logging.getLogger("bertserve.http")

PROTOCOLS = (
    *(tei.router, huggingface.router, huggingface.any_task, openai.router, cohere.router, oip.router),
    *(operations.router, console_page.router),
)

_ABOVE = re.compile(r"/models/[^/]*/?")
"""What stands before the route in a path with a model's name."""


class App:
    """Answers requests: `unauthenticated` rejects a head, `answer` takes a whole request.

    The sender of a reply calls `sent` once, so that counts, logs and traces show the reply that was sent.

    Attributes:
        public: Paths that need no API key.
        probes: Public paths that accept any `Host`, because kubelets and load balancers call an IP address.
        origins: Origins that may call from a browser; None if CORS is off.
    """

    def __init__(self, context: AppContext, routers: Sequence[Router] = PROTOCOLS, *, documented: bool = True) -> None:
        self.context = context
        routers = (*routers, docs_router(self.described)) if documented else routers
        self.routes = [route for router in routers for route in router.routes]
        self.public = frozenset(route.path for route in self.routes if route.public)
        self.probes = self.public - {route.path for route in console_page.router.routes}
        self.origins = context.settings.allowed_origins or None
        self._table = RouteTable(self.routes)
        protocols = (*routers, *PROTOCOLS)  # a path that only another port has gets errors that its clients can read
        self._errors = {route.path: router.errors for router in reversed(protocols) for route in router.routes}
        self._below = [(router.below, router.errors) for router in protocols if router.below]
        self._paths = frozenset(route.path for route in self.routes if "{" not in route.path)
        self._known = KnownPaths(route.path for route in self.routes)
        self._help = "see /docs" if documented else f"available: {', '.join(route.path for route in self.routes)}"
        self._document: dict[str, Any] | None = None

    def route_of(self, path: str) -> str:
        """The route's name in traces, for a request that is rejected before routing."""
        return path if path in self._paths else NO_ROUTE

    def unauthenticated(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> Unauthenticated | None:
        """The rejection of a head without a required API key, before anything reveals whether the route exists.

        CORS preflight requests carry no key.
        """
        keys, authorization = self.context.keys, headers.get(b"authorization")
        if keys is None or keys.allow(authorization):
            return None
        keyless = (path in self.public and method != "POST") or (self.origins and is_preflight(method, headers))
        has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
        return None if keyless and not has_body else refusal(authorization)

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Answers a request. This is the HTTP boundary: every error becomes a reply.

        Raises:
            asyncio.CancelledError: The client closed its connection, so no reply is possible.
        """
        context = self.context
        route = self._table.find(request)
        if route is not None:
            request.route, endpoint = route.path, route.endpoint
        else:
            request.route, endpoint = self._unmatched(request)
        if context.observer is not None:
            request.trace = _trace(request, context.observer)
        try:
            if request.body and b"content-encoding" in request.headers:
                await request.inflate(context.settings.body_limit_bytes, context.large_body_lock)
            return await endpoint(context, request)
        except BertserveError as error:
            return self.refuse(error.without_traceback(), request)
        except asyncio.CancelledError:
            if is_cancelled():
                self.gone(request)
                raise
            # Something that the request waited for was cancelled, such as a model load at shutdown.
            return self.refuse(NotReady("the server is shutting down", begun=True), request)
        except Exception:  # the HTTP boundary
            log.exception("a request failed", extra=fields(request_id=request.request_id))
            return self.refuse(InternalError(), request)

    def refuse(self, error: BertserveError, request: HttpRequest) -> HttpReply:
        return self.errors_of(request).reply(error, request.path, request.request_id)

    def errors_of(self, request: HttpRequest) -> ErrorFormat:
        """What the protocol of a request calls its errors.

        Without a route, that is the protocol of its path: of another method, or without `/models/{model}` before it.
        """
        match = _ABOVE.match(request.path)
        path = "/" + request.path[match.end() :] if match else request.path
        known = self._errors.get(request.route) or self._errors.get(path)
        return known or next((errors for below, errors in self._below if path.startswith(below)), OWN)

    def sent(self, request: HttpRequest, reply: HttpReply, size: int) -> None:
        """Records the outcome of a request: the reply that was sent, and the size of its body in bytes."""
        if request.ended:
            return
        request.ended = True
        error, trace, observer = reply.error, request.trace, self.context.observer
        if error is not None:
            self.context.record_error(error, request.request_id, "http", trace.model if trace else "")
        if observer is None:
            return
        trace = trace or _trace(request, observer)
        if error is not None:
            trace.failed(error.reason, error.http_status, error.http_status)
        trace.status, trace.bytes_out = reply.status, size
        observer.end(trace)

    def gone(self, request: HttpRequest) -> None:
        """Records a request whose client has gone."""
        error = ClientGone("the client closed the connection")
        self.sent(request, HttpReply(b"", error.http_status, error=error), 0)

    async def described(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if self._document is None:
            self._document = await document(self.routes, self._errors, self.context, self.public)
        return self._document

    def _unmatched(self, request: HttpRequest) -> tuple[str, Endpoint]:
        """The name in traces and the endpoint of a request without a route: a CORS preflight, or a rejection."""
        if self.origins and is_preflight(request.method, request.headers):
            return self.route_of(request.path), _allow_origin
        return NO_ROUTE, self._refuse_route

    async def _refuse_route(self, context: AppContext, request: HttpRequest) -> HttpReply:
        path, repository = request.path, context.repository
        if allowed := ", ".join(self._table.methods(path)):
            raise MethodNotAllowed(f"method not allowed; allowed: {allowed}", allowed=allowed)
        models = {*context.v2.names, *(model.name for model in repository.models)}
        if self._known.names_no_model(path, models):
            raise repository.unknown()
        meant = " or ".join(self._known.near(path, models))
        raise route_not_found(path, f"unknown path; {f'did you mean {meant}?' if meant else self._help}")


async def _allow_origin(_: AppContext, __: HttpRequest) -> HttpReply:
    return PREFLIGHT


def _trace(request: HttpRequest, observer: RequestObserver) -> RequestTrace:
    if not observer.detailed:
        return RequestTrace("http", request.method, request.route, request.request_id, request.arrival)
    headers = request.headers
    return RequestTrace(
        *("http", request.method, request.route, request.request_id, request.arrival, len(request.body)),
        traceparent=headers.get(b"traceparent"),
        tracestate=headers.get(b"tracestate"),
    )
