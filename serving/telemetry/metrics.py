"""Prometheus metrics. Each request is recorded once, from the timings that its client also sees."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from serving.lifecycle import State
from serving.telemetry.collectors import Histogram, Tally, Total

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.dispatch import Dispatcher
    from serving.records import Outcome
    from serving.scheduling.batcher import Assignment

_SECONDS = (
    *(round(1e-4 * step, 4) for step in range(1, 31)),
    *(round(3e-3 * 1.25**step, 5) for step in range(1, 39)),
)
"""Every 0.1 ms up to 3 ms, then up to 14 s in steps of a quarter."""

_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

_RECENT_BATCHES = 128

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class BatchSeen(NamedTuple):
    """One of the last batches; times in microseconds."""

    lane: int
    texts: int
    tokens: int
    padding: int
    predicted_us: float
    occupied_us: float


class Metrics:
    """Every metric of the server, in a registry of its own.

    Attributes:
        registry: Where they are scraped.
        recent: The last batches.
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
        self._padding = Total("bertserve_padding_tokens", "Tokens of padding that were computed.", self.registry)
        self._cost_ratio = Histogram(
            "bertserve_batch_cost_ratio",
            "Time that a batch held its lane, over the time predicted.",
            buckets=_RATIOS,
            registry=self.registry,
        )
        self._predicted = Total("bertserve_batch_predicted_us", "Predicted time of all batches.", self.registry)
        self._actual = Total("bertserve_batch_actual_us", "Their true time.", self.registry)
        self.recent: deque[BatchSeen] = deque(maxlen=_RECENT_BATCHES)
        self._restarts = Total("bertserve_engine_restarts", "Deaths of the engine process.", self.registry)
        self._state = Gauge("bertserve_state", "1 for the server's state.", ["state"], registry=self.registry)
        self._requests.counts["ok"] = 0
        self._tokenize, self._queue, self._compute, self._request = self._stages.values()

    def answered(self, outcome: Outcome[Any]) -> None:
        """Records a request that got its answer."""
        timings = outcome.timings
        self._requests.counts["ok"] += 1
        self._tokenize.observe(timings.tokenize_us / 1e6)
        self._queue.observe(timings.queue_us / 1e6)
        self._compute.observe(timings.compute_us / 1e6)
        self._request.observe(timings.total_us / 1e6)
        self._texts.value += len(outcome.answer)
        self._tokens.value += outcome.tokens
        self._truncated.value += outcome.truncated_tokens

    def refused(self, reason: str) -> None:
        """Records a request that got an error."""
        self._requests.counts[reason] += 1

    def batch_started(self, assignment: Assignment) -> None:
        """Records a batch that has been given to its lane."""
        self._batches.observe(len(assignment.items))
        self._padding.value += assignment.padding

    def batch_ended(self, assignment: Assignment, occupied_us: float) -> None:
        """Records for how long it held its lane."""
        predicted_us, texts = assignment.predicted_us, len(assignment.items)
        if occupied_us > 0:
            self._cost_ratio.observe(occupied_us / predicted_us if predicted_us else 1.0)
            self._predicted.value += int(predicted_us)
            self._actual.value += int(occupied_us)
        self.recent.append(
            BatchSeen(assignment.lane, texts, assignment.tokens, assignment.padding, predicted_us, occupied_us)
        )

    def engine_died(self) -> None:
        """Records a death of the engine process."""
        self._restarts.value += 1

    def state(self, current: State) -> None:
        """Records a change of the server's state."""
        for state in State:
            self._state.labels(state.value).set(state is current)

    def follow(self, dispatcher: Dispatcher) -> None:
        """Shows what a dispatcher does whenever the metrics are scraped."""
        scheduler = dispatcher.scheduler
        queue, admission = scheduler.queue, scheduler.admission
        self._gauge("bertserve_queue_texts", "Texts that wait for an engine.", lambda: queue.items)
        self._gauge("bertserve_queue_tokens", "Their tokens.", lambda: queue.tokens)
        self._gauge("bertserve_queue_work_seconds", "Predicted work that waits.", lambda: queue.backlog.total_us / 1e6)
        self._gauge("bertserve_admitted_tokens", "Tokens in flight.", lambda: admission.in_flight)
        Tally(
            "bertserve_refusals",
            "Requests refused at admission: `queue_full`, `predicted_late` (429) or `hopeless` (504).",
            "reason",
            self.registry,
            scheduler.refusals,
        )
        Tally(
            "bertserve_deadline_misses",
            "Requests admitted and not answered in time, by where their deadline met them: `queue` or `engine`.",
            "where",
            self.registry,
            dispatcher.misses,
        )

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        Gauge(name, text, registry=self.registry).set_function(read)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
