"""The access log: a line for each request, after its reply."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from serving.logs import fields

if TYPE_CHECKING:
    from serving.telemetry.seen import Seen

log = logging.getLogger("bertserve.access")

_DIGITS = 3


def write(seen: Seen) -> None:
    """Logs a request: what was asked, what came of it, and where the time went (milliseconds)."""
    known: dict[str, object] = {
        "request_id": seen.request_id,
        "protocol": seen.protocol,
        "method": seen.method,
        "route": seen.route,
        "status": seen.status,
        "reason": seen.reason,
        "total_ms": round((seen.ended - seen.began) * 1e3, _DIGITS),
        "bytes_in": seen.bytes_in,
        "bytes_out": seen.bytes_out,
    }
    if (times := seen.timings) is not None:
        known |= {
            "model": seen.model,
            "texts": seen.texts,
            "tokens": seen.tokens,
            "tokenize_ms": round(times.tokenize_us / 1e3, _DIGITS),
            "queue_ms": round(times.queue_us / 1e3, _DIGITS),
            "compute_ms": round(times.compute_us / 1e3, _DIGITS),
        }
    log.info("request", extra={**fields(**known), "limited": True})
