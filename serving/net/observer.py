"""Collects the traces of requests for the access log and for spans; see `RequestTrace`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.records import RequestTrace


class RequestObserver:
    """Hands on the trace of each request that has ended.

    Where the access log and tracing are both off, a transport has None in its place.
    """

    def __init__(self, sinks: Sequence[Callable[[RequestTrace], None]]) -> None:
        self._sinks = sinks

    def end(self, trace: RequestTrace) -> None:
        """Ends the trace; it is read after the reply has been sent."""
        trace.ended = time.perf_counter()
        loop = asyncio.get_running_loop()
        for sink in self._sinks:
            loop.call_soon(sink, trace)
