"""Observes finished requests after their replies: counts, access log and spans; see `RequestTrace`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bertserve.serving.inference.requests import Outcome, RequestTrace


class RequestObserver:
    """Counts the answers of each finished request, and passes on its trace.

    Attributes:
        detailed: Whether traces are read; if not, they hold only answers and an error.
    """

    def __init__(
        self, count_outcome: Callable[[Outcome[Any], str], None], sinks: Sequence[Callable[[RequestTrace], None]]
    ) -> None:
        self._count_outcome = count_outcome
        self._sinks = sinks
        self.detailed = bool(sinks)

    def end(self, trace: RequestTrace) -> None:
        """Ends the trace. Its consumers, if any, run after the replies of this turn of the loop."""
        trace.ended = time.perf_counter()
        if self.detailed:
            asyncio.get_running_loop().call_soon(self._tell, trace)
        else:
            self._tell(trace)  # cheaper than another turn of the event loop

    def _tell(self, trace: RequestTrace) -> None:
        outcomes = trace.let_go() if self.detailed else trace.outcomes
        if trace.reason == "ok":
            for outcome in outcomes:
                self._count_outcome(outcome, trace.protocol)
        for sink in self._sinks:
            sink(trace)
