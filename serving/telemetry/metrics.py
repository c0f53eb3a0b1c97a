"""Prometheus metrics. Each request is recorded once, from the timings that its client also sees."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from serving.lifecycle import State
from serving.records import Totals
from serving.telemetry.collectors import Histogram, Tally, Total

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.records import Outcome

_SECONDS = tuple(round(50e-6 * 1.35**step, 7) for step in range(40))
"""50 us to 6 s in steps of 35%: near 2 ms a bucket is half a millisecond wide."""

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Every metric of the server, in a registry of its own.

    Attributes:
        batches: Batches that started.
        totals: What each model has answered, by its name.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Tally(
            "bertserve_requests", "Requests by outcome; `ok` or an error's reason.", "reason", self.registry
        )
        self._stages = {
            name: Histogram(f"bertserve_{name}_seconds", text, buckets=_SECONDS, registry=self.registry)
            for name, text in (
                ("tokenize", "Time to tokenise a request."),
                ("queue", "Longest time a text of a request waited for an engine."),
                ("compute", "Longest time an engine spent on a batch of a request."),
                ("request", "Time from a request's arrival to its answer."),
            )
        }
        self._texts = Total("bertserve_texts", "Texts answered.", self.registry)
        self._tokens = Total("bertserve_tokens", "Tokens computed, padding not counted.", self.registry)
        self._truncated = Total("bertserve_truncated_tokens", "Tokens cut off.", self.registry)
        self._batches = Histogram(
            "bertserve_batch_size", "Texts in a batch.", buckets=_BATCH_SIZES, registry=self.registry
        )
        self._restarts = Total("bertserve_engine_restarts", "Deaths of the engine process.", self.registry)
        self._state = Gauge("bertserve_state", "1 for the server's state.", ["state"], registry=self.registry)
        self._requests.counts["ok"] = 0
        self.batches = 0
        self.totals: defaultdict[str, Totals] = defaultdict(Totals)
        self._tokenize, self._queue, self._compute, self._request = self._stages.values()

    def answered(self, outcome: Outcome[Any]) -> None:
        """Records a request that got its answer."""
        timings = outcome.timings
        self._requests.counts["ok"] += 1
        self._tokenize.observe(timings.tokenize_us / 1e6)
        self._queue.observe(timings.queue_us / 1e6)
        self._compute.observe(timings.compute_us / 1e6)
        self._request.observe(timings.total_us / 1e6)
        texts = len(outcome.answer)
        self._texts.value += texts
        self._tokens.value += outcome.tokens
        self._truncated.value += outcome.truncated_tokens
        totals = self.totals[outcome.model]
        totals.requests += 1
        totals.texts += texts
        totals.tokenize_us += timings.tokenize_us
        totals.queue_us += timings.queue_us
        totals.compute_us += timings.compute_us
        totals.total_us += timings.total_us
        totals.last_at = time.time()

    def refused(self, reason: str) -> None:
        """Records a request that got an error."""
        self._requests.counts[reason] += 1

    def batch(self, size: int) -> None:
        """Records a batch that started."""
        self._batches.observe(size)
        self.batches += 1

    def engine_died(self) -> None:
        """Records a death of the engine process."""
        self._restarts.value += 1

    def state(self, current: State) -> None:
        """Records a change of the server's state."""
        for state in State:
            self._state.labels(state.value).set(state is current)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Adds a gauge that is read when scraped."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
