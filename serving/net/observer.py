"""Collects the traces of requests for the access log and for spans; see `RequestTrace`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Literal

from serving.records import RequestTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class RequestObserver:
    """Begins the traces of requests and hands each on once the request has ended.

    Where the access log and tracing are both off, a transport has None in its place.
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
        return RequestTrace(protocol, method, route, request_id, began, bytes_in, traceparent, tracestate)

    def end(self, trace: RequestTrace) -> None:
        """Ends the trace; it is read after the reply has been sent."""
        trace.ended = time.perf_counter()
        loop = asyncio.get_running_loop()
        for sink in self._sinks:
            loop.call_soon(sink, trace)
