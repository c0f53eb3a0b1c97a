"""Figures of the last minute: rates from the metrics' counts, quantiles from the last requests.

The counts are read every two seconds, which takes a fraction of a millisecond.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bertserve.serving.telemetry.metrics import Counts, Metrics

STEP_S = 2.0
STEPS = 30

_QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}
_REQUEST = "request"


class _Step(NamedTuple):
    at: float
    counts: Counts
    requests_per_s: float
    p99_ms: float | None


class Recent:
    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.perf_counter) -> None:
        self._metrics = metrics
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._started = clock()
        self._steps = deque([_Step(self._started, metrics.counts(), 0.0, None)], maxlen=STEPS + 1)

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(STEP_S, self._tick)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        last, now, counts = self._steps[-1], self._clock(), self._metrics.counts()
        seconds = max(now - last.at, 1e-9)
        p99_ms = self._latency(last.counts, counts)["latency"][_REQUEST]["p99_ms"]
        requests_per_s = round((counts.requests - last.counts.requests) / seconds, 2)
        self._steps.append(_Step(now, counts, requests_per_s, p99_ms))

    def report(self) -> dict[str, Any]:
        """The last minute, or the time since the start; times in milliseconds, null if nothing was answered."""
        first, now, counts = self._steps[0], self._clock(), self._metrics.counts()
        seconds = max(now - first.at, 1e-9)
        old = first.counts
        steps = list(self._steps)[1:]
        return {
            "seconds": round(seconds, 1),
            "requests_per_s": round((counts.requests - old.requests) / seconds, 2),
            "texts_per_s": round((counts.texts - old.texts) / seconds, 2),
            "tokens_per_s": round((counts.tokens - old.tokens) / seconds, 2),
            "errors_per_s": round((sum(counts.errors.values()) - sum(old.errors.values())) / seconds, 2),
            **self._latency(old, counts),
            "steps": {
                "seconds": STEP_S,
                "requests_per_s": [step.requests_per_s for step in steps],
                "p99_ms": [step.p99_ms for step in steps],
            },
        }

    def totals(self) -> dict[str, Any]:
        counts = self._metrics.counts()
        return {
            "seconds": round(self._clock() - self._started, 1),
            "requests": counts.requests,
            "texts": counts.texts,
            "tokens": counts.tokens,
            "truncated_tokens": counts.truncated,
            "errors": counts.errors,
            "engine_restarts": counts.engine_restarts,
            **self._latency(None, counts),
        }

    def _tick(self) -> None:
        self.start()
        self.look()

    def _latency(self, old: Counts | None, new: Counts) -> dict[str, Any]:
        """Quantiles of each stage: exact if all requests are among the last ones, otherwise bounds of their buckets."""
        buckets, times = {stage: _between(old, new, stage) for stage in new.stages}, self._metrics.times
        requests = sum(buckets[_REQUEST])
        known = len(times) // len(buckets)
        exact = requests <= known
        latency: dict[str, dict[str, float | None]] = {stage: dict.fromkeys(_QUANTILES) for stage in buckets}
        if requests and exact:
            last = np.fromiter(islice(times, (known - requests) * len(buckets), None), float).reshape(requests, -1)
            found = np.quantile(last, list(_QUANTILES.values()), axis=0, method="inverted_cdf") / 1e3
            for stage, values in zip(buckets, found.T.round(3).tolist(), strict=True):
                latency[stage] = dict(zip(_QUANTILES, values, strict=True))
        elif requests:
            for stage, counts in buckets.items():
                bounds = {name: upper_bound(self._metrics.bounds, counts, share) for name, share in _QUANTILES.items()}
                latency[stage] = {name: round(bound * 1e3, 3) for name, bound in bounds.items()}
        return {"latency": latency, "latency_of": {"requests": requests, "exact": exact}}


def upper_bound(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """The bound of the bucket with the quantile (share 0 to 1) of the counts.

    Beyond the last bound it is that one.
    """
    reached = list(accumulate(counts))
    bucket = next(index for index, total in enumerate(reached) if total >= share * reached[-1] and counts[index])
    return bounds[min(bucket, len(bounds) - 1)]


def _between(old: Counts | None, new: Counts, stage: str) -> list[int]:
    if old is None:
        return list(new.stages[stage])
    return [after - before for after, before in zip(new.stages[stage], old.stages[stage], strict=True)]
