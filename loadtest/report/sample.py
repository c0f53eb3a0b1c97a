"""Samples of measurements, and how several become one figure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertserve.loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

DISTURBED_PERCENT = 10.0
"""A measurement is undisturbed if other processes take less than this share of the machine."""

Exchange = tuple[float, float]
"""When a request was sent and when its reply was complete, in seconds on the clock `time.perf_counter`."""


@dataclass(slots=True, frozen=True)
class Window:
    """When replies count, in seconds on the clock `time.perf_counter`: after the warm-up, before the end."""

    begin: float
    end: float

    @classmethod
    def after(cls, now: float, warm_up_s: float, seconds: float) -> Window:
        """The window of a measurement that starts now."""
        return cls(now + warm_up_s, now + warm_up_s + seconds)


@dataclass(slots=True, frozen=True)
class Sample:
    """One measurement of one subject.

    Attributes:
        requests: Replies counted.
        exchanges: All replies, including those of the warm-up and those still in flight at the end.
        per_s: Replies per second.
        p50_ms: Median time from sending a request to receiving the complete reply.
        p99_ms: 99th percentile of the same.
        client_cpu_us: CPU time of the measuring process per request, in all of its threads.
        server_cpu_us: CPU time of the server process per request; 0 for the raw engine.
        engine_cpu_us: CPU time of the engine process per request; 0 for the raw engine.
        fronts_cpu_us: CPU time of all front processes per request.
        others_percent: Share of the machine's cores that processes outside of the benchmark used meanwhile.
    """

    requests: int
    exchanges: int
    per_s: float
    p50_ms: float
    p99_ms: float
    client_cpu_us: float
    server_cpu_us: float = 0.0
    engine_cpu_us: float = 0.0
    others_percent: float = 0.0
    fronts_cpu_us: float = 0.0

    @property
    def quiet(self) -> bool:
        """Whether other processes left the machine undisturbed."""
        return self.others_percent < DISTURBED_PERCENT


@dataclass(slots=True, frozen=True)
class Spread:
    """A figure over several rounds: median, minimum, maximum, and number of rounds."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def times(self, factor: float) -> Spread:
        """The spread in another unit."""
        return Spread(factor * self.median, factor * self.low, factor * self.high, self.rounds)

    def text(self, decimals: int, sign: str = "") -> str:
        """The median, with minimum and maximum in parentheses if they differ."""
        median = f"{self.median:{sign}.{decimals}f}"
        return median if self.low == self.high else f"{median} ({self.low:.{decimals}f} to {self.high:.{decimals}f})"


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: the smallest value that at least `percent` of all values do not exceed.

    Args:
        ordered: At least one value, ascending.
        percent: Above 0, at most 100.
    """
    return ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1]


def sample_of(exchanges: Sequence[Exchange], window: Window, cpu_s: float) -> Sample:
    """Summarizes exchanges.

    Args:
        exchanges: All exchanges, including the warm-up.
        window: Which replies count.
        cpu_s: CPU time of all of `exchanges`, in seconds.

    Raises:
        BenchError: No reply lies in the window.
    """
    times = sorted(done - sent for sent, done in exchanges if window.begin <= done <= window.end)
    if not times:
        raise BenchError(f"no reply within {window.end - window.begin:g} s: measure longer (--seconds)")
    return Sample(
        requests=len(times),
        exchanges=len(exchanges),
        per_s=len(times) / (window.end - window.begin),
        p50_ms=percentile(times, 50) * 1e3,
        p99_ms=percentile(times, 99) * 1e3,
        client_cpu_us=cpu_s / len(exchanges) * 1e6,
    )
