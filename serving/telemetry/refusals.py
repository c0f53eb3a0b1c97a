"""What becomes known of a request that gets an error: it is always counted, and logged as often as helps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from serving.logs import fields

if TYPE_CHECKING:
    from serving.errors import BertserveError
    from serving.logs import RateLimit
    from serving.telemetry.metrics import Metrics

log = logging.getLogger("bertserve.requests")

_SERVER_FAULT = 500
_GONE = "client_gone"


class Refusals:
    """Counts and logs errors.

    A client that has gone is counted alone: clients do as they like, and nobody waits for an explanation.
    """

    def __init__(self, metrics: Metrics, limit: RateLimit) -> None:
        """Names where they go.

        Args:
            metrics: Counts them.
            limit: What bounds the lines of each reason, however many are refused.
        """
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
        known = fields(request_id=request_id, reason=reason, status=error.http_status, why=error.message)
        if hidden:
            known["fields"]["hidden"] = hidden
        log.log(level, "request refused", extra={**known, "limited": True})
