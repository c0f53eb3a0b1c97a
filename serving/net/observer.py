"""What becomes of requests, told once their replies are sent: counts, the access log, spans; see `RequestTrace`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.inference.requests import Outcome, RequestTrace


class RequestObserver:
    """Counts the answers of each request that has ended, and hands on its trace.

    Attributes:
        detailed: Whether anybody reads traces; if not, they need no more in them than answers and an error.
    """

    def __init__(
        self, count_outcome: Callable[[Outcome[Any], str], None], sinks: Sequence[Callable[[RequestTrace], None]]
    ) -> None:
        self._count_outcome = count_outcome
        self._sinks = sinks
        self.detailed = bool(sinks)

    def end(self, trace: RequestTrace) -> None:
        """Ends the trace. Where it is written down, that waits for the replies that go out now."""
        trace.ended = time.perf_counter()
        if self.detailed:
            asyncio.get_running_loop().call_soon(self._tell, trace)
        else:
            self._tell(trace)  # takes less than another turn of the event loop would

    def _tell(self, trace: RequestTrace) -> None:
        outcomes = trace.let_go() if self.detailed else trace.outcomes
        if trace.reason == "ok":
            for outcome in outcomes:
                self._count_outcome(outcome, trace.protocol)
        for sink in self._sinks:
            sink(trace)
