"""The last minute: rates and quantiles from the metrics' own counts.

The counts are read every two seconds, which takes some microseconds; requests pay nothing for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from serving.telemetry.metrics import Counts, Metrics

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
        """Ends a step."""
        last, now, counts = self._steps[-1], self._clock(), self._metrics.counts()
        seconds = max(now - last.at, 1e-9)
        p99_ms = _quantile_ms(self._metrics.bounds, _between(last.counts, counts, _REQUEST), 0.99)
        requests_per_s = round((counts.requests - last.counts.requests) / seconds, 2)
        self._steps.append(_Step(now, counts, requests_per_s, p99_ms))

    @property
    def requests_per_s(self) -> float:
        """Of the last whole step."""
        return self._steps[-1].requests_per_s

    def report(self) -> dict[str, Any]:
        """The last minute, or as much of it as there was; times in milliseconds, null where nothing was answered."""
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
            "latency": self._latency(old, counts),
            "steps": {
                "seconds": STEP_S,
                "requests_per_s": [step.requests_per_s for step in steps],
                "p99_ms": [step.p99_ms for step in steps],
            },
        }

    def totals(self) -> dict[str, Any]:
        """Everything since the server started."""
        counts = self._metrics.counts()
        return {
            "seconds": round(self._clock() - self._started, 1),
            "requests": counts.requests,
            "texts": counts.texts,
            "tokens": counts.tokens,
            "truncated_tokens": counts.truncated,
            "errors": counts.errors,
            "engine_restarts": counts.engine_restarts,
            "latency": self._latency(None, counts),
        }

    def _tick(self) -> None:
        self.start()
        self.look()

    def _latency(self, old: Counts | None, new: Counts) -> dict[str, Mapping[str, float | None]]:
        bounds = self._metrics.bounds
        counts_of = {stage: _between(old, new, stage) for stage in new.stages}
        return {
            stage: {name: _quantile_ms(bounds, counts, share) for name, share in _QUANTILES.items()}
            for stage, counts in counts_of.items()
        }


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value that a share (0 to 1) of what was counted does not exceed; None where nothing was counted.

    Within a bucket values are taken as evenly spread, as Prometheus' `histogram_quantile` does; beyond the last
    bound the bound itself is the answer.
    """
    reached = list(accumulate(counts))
    if not reached[-1]:
        return None
    rank = share * reached[-1]
    bucket = next(index for index, total in enumerate(reached) if total >= rank and counts[index])
    if bucket == len(bounds):
        return bounds[-1]
    lower = bounds[bucket - 1] if bucket else 0.0
    below = reached[bucket] - counts[bucket]
    return lower + (bounds[bucket] - lower) * (rank - below) / counts[bucket]


def _quantile_ms(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    value = quantile(bounds, counts, share)
    return None if value is None else round(value * 1e3, 3)


def _between(old: Counts | None, new: Counts, stage: str) -> list[int]:
    if old is None:
        return list(new.stages[stage])
    return [after - before for after, before in zip(new.stages[stage], old.stages[stage], strict=True)]
