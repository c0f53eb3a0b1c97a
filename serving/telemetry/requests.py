"""What is reported of each request beside its metrics: refusals, lines of the access log, and its trace."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Literal

from serving.logs import fields
from serving.records import RequestTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.errors import BertserveError
    from serving.logs import RateLimit
    from serving.telemetry.metrics import Metrics

log = logging.getLogger("bertserve.requests")
access_log = logging.getLogger("bertserve.access")

_SERVER_FAULT = 500
_GONE = "client_gone"
_DIGITS = 3


class Refusals:
    """Counts errors, and logs them at a bounded rate.

    A client that has gone is counted and not logged.
    """

    def __init__(self, metrics: Metrics, limit: RateLimit) -> None:
        self._metrics = metrics
        self._limit = limit

    def refused(self, error: BertserveError, request_id: str) -> None:
        """Records a request that a transport answers with an error."""
        reason = error.reason
        self._metrics.refused(reason)
        if reason == _GONE:
            return
        level = logging.WARNING if error.http_status >= _SERVER_FAULT else logging.INFO
        if not log.isEnabledFor(level) or (hidden := self._limit.admit(reason)) is None:
            return
        members = fields(request_id=request_id, reason=reason, status=error.http_status, why=error.message)
        if hidden:
            members["fields"]["hidden"] = hidden
        log.log(level, "request refused", extra={**members, "limited": True})


class RequestObserver:
    """Begins the traces of requests and hands each on once the request has ended.

    There is one only where something reads traces. Where the access log and tracing are both off, a transport has
    None in its place.
    """

    def __init__(self, sinks: Sequence[Callable[[RequestTrace], None]]) -> None:
        self._sinks = sinks

    def begin(
        self,
        protocol: Literal["http", "grpc"],
        method: str,
        route: str,
        request_id: str,
        began: float,
        bytes_in: int,
        *,
        traceparent: bytes | None,
        tracestate: bytes | None,
    ) -> RequestTrace:
        """The trace of a request that has arrived; see `RequestTrace`."""
        return RequestTrace(protocol, method, route, request_id, began, bytes_in, traceparent, tracestate)

    def end(self, trace: RequestTrace) -> None:
        """The reply is made; the trace is read after it has been sent."""
        trace.ended = time.perf_counter()
        loop = asyncio.get_running_loop()
        for sink in self._sinks:
            loop.call_soon(sink, trace)


def write_access_line(trace: RequestTrace) -> None:
    """Logs what a request asked, what came of it, and where the time went (milliseconds)."""
    members: dict[str, object] = {
        "request_id": trace.request_id,
        "protocol": trace.protocol,
        "method": trace.method,
        "route": trace.route,
        "status": trace.status,
        "reason": trace.reason,
        "total_ms": round((trace.ended - trace.began) * 1e3, _DIGITS),
        "bytes_in": trace.bytes_in,
        "bytes_out": trace.bytes_out,
    }
    if (times := trace.timings) is not None:
        members |= {
            "model": trace.model,
            "texts": trace.texts,
            "tokens": trace.tokens,
            "tokenize_ms": round(times.tokenize_us / 1e3, _DIGITS),
            "queue_ms": round(times.queue_us / 1e3, _DIGITS),
            "compute_ms": round(times.compute_us / 1e3, _DIGITS),
        }
    access_log.info("request", extra={**fields(**members), "limited": True})
