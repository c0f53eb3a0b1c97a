"""What the endpoints of every protocol work with, and the boundary around them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from serving.errors import BertserveError, ClientGone, InternalError, NotReady
from serving.http.exchange import HttpReply, HttpRequest, error_reply
from serving.inference.requests import RequestTrace
from serving.logs import fields
from serving.net.orca import LOAD_FORMAT
from serving.unawaited import is_cancelled

if TYPE_CHECKING:
    from serving.bulk.batches_api.service import BatchesApiService
    from serving.inference.pipeline import Pipeline
    from serving.inference.served_models import Repository
    from serving.lifecycle import Lifecycle
    from serving.net.observer import RequestObserver
    from serving.net.orca import LoadReports
    from serving.net.requests import RecordError
    from serving.oip.service import V2Service
    from serving.security.keys import ApiKeys
    from serving.settings import Settings
    from serving.tei.service import TeiService

log = logging.getLogger("bertserve.http")

Endpoint: TypeAlias = Callable[["AppContext", HttpRequest], Coroutine[Any, Any, HttpReply]]
"""Answers a request of one route, or raises a `BertserveError`."""

ReadIds: TypeAlias = Callable[[Sequence[str | list[int]]], list[str]]


@dataclass(slots=True, frozen=True)
class AppContext:
    """What endpoints need.

    Attributes:
        v2: What the Open Inference Protocol answers on both wires.
        tei: The same of text-embeddings-inference's.
        status: Makes the body of `/status`; without the cost tables where `costs` is false.
        render_metrics: Makes the body of `/metrics`.
        record_error: Called with each error that a client gets.
        load_reports: What balancers are told of the load; None where nothing is.
        keys: API keys; None where none is needed.
        observer: Is told of requests that have ended; None where nobody listens.
        jobs: Files and batches; None where they are off.
        read_ids: Reads token ids of another tokenizer back to texts; None where they are refused.
        refuses_unknown: Whether a field that is not read is refused.
        large_body_lock: Held by the large body that is decompressed, or looked through: one at a time is.

    Whoever sends a reply tells `sent`, once: what is counted, logged and traced is the reply that went out.
    """

    pipeline: Pipeline
    repository: Repository
    lifecycle: Lifecycle
    settings: Settings
    v2: V2Service
    tei: TeiService
    status: Callable[..., dict[str, Any]]
    render_metrics: Callable[[], bytes]
    metrics_type: str
    record_error: RecordError
    load_reports: LoadReports | None = None
    keys: ApiKeys | None = None
    observer: RequestObserver | None = None
    jobs: BatchesApiService | None = None
    read_ids: ReadIds | None = None
    refuses_unknown: bool = False
    large_body_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(self, endpoint: Endpoint, route: str, request: HttpRequest) -> HttpReply:
        """Runs an endpoint. This is HTTP's boundary: every error becomes a reply.

        Raises:
            asyncio.CancelledError: The client closed its connection; there is nobody to answer.
        """
        if self.observer is not None:
            request.trace = _trace(route, request, self.observer)
        request.refuses_unknown = self.refuses_unknown
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
            # What it waited for is, as a load is when the server ends.
            return refuse(NotReady("the server ends before this request could be answered", begun=True), request)
        except Exception:  # the HTTP boundary
            log.exception("a request failed", extra=fields(request_id=request.request_id))
            return refuse(InternalError(), request)

    def load_report(self, headers: Mapping[bytes, bytes]) -> bytes:
        """The line of the load in the head of the reply to a request with these headers; empty where it has none."""
        reports = self.load_reports
        if reports is None or (form := headers.get(LOAD_FORMAT, reports.usual_form)) is None:
            return b""
        return reports.report().header(form)

    def sent(self, request: HttpRequest, reply: HttpReply, size: int) -> None:
        """Records what became of a request: the reply that went out, and how many bytes of its body."""
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
        if request.stream is not None:
            trace.bytes_in = request.stream.taken
        trace.status, trace.bytes_out = reply.status, size
        self.observer.end(trace)

    def gone(self, request: HttpRequest, reply: HttpReply | None = None, size: int = 0) -> None:
        """The same of a client that has left; `reply` is one of which it took so many bytes of the body."""
        error = ClientGone("the client closed the connection")
        self.sent(request, HttpReply(b"", error.http_status if reply is None else reply.status, error=error), size)


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
