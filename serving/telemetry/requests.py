"""Request logs: rejections, and the lines of the access log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from bertserve.serving.errors import BertserveError, EngineFault
from bertserve.serving.logs import fields

if TYPE_CHECKING:
    from bertserve.serving.inference.requests import RequestTrace
    from bertserve.serving.logs import RateLimit
    from bertserve.serving.telemetry.metrics import Metrics

log = logging.getLogger("bertserve.requests")
access_log = logging.getLogger("bertserve.access")

_SERVER_FAULT = 500
_GONE = "client_gone"
_DIGITS = 3


class SpanCounts:
    """Counts of the spans of traced requests.

    Attributes:
        made: Spans that were queued.
        taken: Queued spans that no longer wait: exported or dropped.
        dropped: Lost spans by reason: `queue_full`, `export_failed`, or `rejected` by the collector.
    """

    def __init__(self) -> None:
        self.made = self.taken = 0
        self.dropped = {"queue_full": 0, "export_failed": 0, "rejected": 0}

    @property
    def waiting(self) -> int:
        return self.made - self.taken


class Refusals:
    """Counts errors and logs them at a limited rate; disconnected clients are only counted."""

    def __init__(self, metrics: Metrics, limit: RateLimit) -> None:
        self._metrics = metrics
        self._limit = limit

    def refused(self, error: BertserveError, request_id: str, protocol: str, model: str) -> None:
        """`model` is empty if the request was rejected before its model was known."""
        reason = error.reason
        self._metrics.refused(reason, protocol, model)
        if reason == _GONE:
            return
        if isinstance(error, EngineFault) and error.news:
            message = "an input crashed two engine processes and is rejected from now on"
            log.error(message, extra=fields(request_id=request_id))
            return
        level = logging.WARNING if error.http_status >= _SERVER_FAULT else logging.INFO
        if not log.isEnabledFor(level) or (hidden := self._limit.admit(reason)) is None:
            return
        members = fields(request_id=request_id, reason=reason, status=error.http_status, why=error.message)
        if hidden:
            members["fields"]["hidden"] = hidden
        log.log(level, "request rejected", extra={**members, "limited": True})


def write_access_line(trace: RequestTrace) -> None:
    """Logs the request, its outcome, and the time of each stage (milliseconds)."""
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
