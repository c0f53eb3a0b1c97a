"""The context of the endpoints of all protocols, and the error boundary around them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from bertserve.serving.errors import BertserveError, ClientGone, InternalError, NotReady
from bertserve.serving.http.exchange import HttpReply, HttpRequest
from bertserve.serving.http.faults import error_reply
from bertserve.serving.inference.requests import RequestTrace
from bertserve.serving.logs import fields
from bertserve.serving.unawaited import is_cancelled

if TYPE_CHECKING:
    from bertserve.serving.inference.pipeline import Pipeline
    from bertserve.serving.inference.served_models import Repository
    from bertserve.serving.lifecycle import Lifecycle
    from bertserve.serving.net.observer import RequestObserver
    from bertserve.serving.net.requests import RecordError
    from bertserve.serving.oip.service import V2Service
    from bertserve.serving.security.keys import ApiKeys
    from bertserve.serving.settings import Settings

log = logging.getLogger("bertserve.http")


class Core(Protocol):
    """The core process, in a front."""

    async def call_http(self, method: str, route: str, request: HttpRequest) -> HttpReply:
        """The core's reply to a request of a route; raises the `BertserveError` of its endpoint."""


Endpoint: TypeAlias = Callable[["AppContext", HttpRequest], Coroutine[Any, Any, HttpReply]]
"""Answers a request of one route, or raises a `BertserveError`."""

ReadIds: TypeAlias = Callable[[Sequence[str | list[int]]], list[str]]


@dataclass(slots=True, frozen=True)
class AppContext:
    """The dependencies of endpoints.

    Attributes:
        v2: The Open Inference Protocol, shared by HTTP and gRPC.
        status: Returns the body of `/status`; without cost tables if `costs` is false.
        render_metrics: Returns the body of `/metrics`.
        record_error: Called with each error that a client receives.
        keys: API keys; None if no key is needed.
        observer: Receives the traces of finished requests; None if nothing observes them.
        read_ids: Decodes token ids of another tokenizer to texts; None if such ids are rejected.
        core: The core process in a front; None in the core itself.
        gather: Gathers the counts of front processes, before counts are shown; None without such processes.
        large_body_lock: Held while a large body is decompressed or scanned: one at a time.

    The sender of a reply calls `sent` once, so that counts, logs and traces show the reply that was sent.
    """

    pipeline: Pipeline
    repository: Repository
    lifecycle: Lifecycle
    settings: Settings
    v2: V2Service
    status: Callable[..., dict[str, Any]]
    render_metrics: Callable[[], bytes]
    record_error: RecordError
    keys: ApiKeys | None = None
    observer: RequestObserver | None = None
    read_ids: ReadIds | None = None
    core: Core | None = None
    gather: Callable[[], Awaitable[None]] | None = None
    large_body_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(self, endpoint: Endpoint, route: str, request: HttpRequest) -> HttpReply:
        """Runs an endpoint. This is the HTTP boundary: every error becomes a reply.

        Raises:
            asyncio.CancelledError: The client closed its connection, so no reply is possible.
        """
        if self.observer is not None:
            request.trace = _trace(route, request, self.observer)
        try:
            if request.body and b"content-encoding" in request.headers:
                await request.inflate(self.settings.body_limit_bytes, self.large_body_lock)
            return await endpoint(self, request)
        except BertserveError as error:
            return refuse(error.without_traceback(), request)
        except asyncio.CancelledError:
            if is_cancelled():
                self.gone(request)
                raise
            # Something that the request waited for was cancelled, such as a model load at shutdown.
            return refuse(NotReady("the server is shutting down", begun=True), request)
        except Exception:  # the HTTP boundary
            log.exception("a request failed", extra=fields(request_id=request.request_id))
            return refuse(InternalError(), request)

    def sent(self, request: HttpRequest, reply: HttpReply, size: int) -> None:
        """Records the outcome of a request: the reply that was sent, and the size of its body in bytes."""
        if request.ended:
            return
        request.ended = True
        error, trace = reply.error, request.trace
        if error is not None:
            self.record_error(error, request.request_id, "http", trace.model if trace else "")
        if self.observer is None:
            return
        trace = trace or _trace(request.route, request, self.observer)
        if error is not None:
            trace.failed(error.reason, error.http_status, error.http_status)
        trace.status, trace.bytes_out = reply.status, size
        self.observer.end(trace)

    def gone(self, request: HttpRequest) -> None:
        """Records a request whose client has gone."""
        error = ClientGone("the client closed the connection")
        self.sent(request, HttpReply(b"", error.http_status, error=error), 0)


def refuse(error: BertserveError, request: HttpRequest) -> HttpReply:
    return error_reply(request.path, error, request.request_id)


def _trace(route: str, request: HttpRequest, observer: RequestObserver) -> RequestTrace:
    if not observer.detailed:
        return RequestTrace("http", request.method, route, request.request_id, request.arrival)
    headers = request.headers
    return RequestTrace(
        *("http", request.method, route, request.request_id, request.arrival, len(request.body)),
        traceparent=headers.get(b"traceparent"),
        tracestate=headers.get(b"tracestate"),
    )
