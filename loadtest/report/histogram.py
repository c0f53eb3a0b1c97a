"""Latency histograms (HdrHistogram) with three significant digits, from 1 us to 100 s."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from bertserve.loadtest.errors import check_installed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hdrh.histogram import HdrHistogram
    from numpy.typing import NDArray

_MIN_US, _MAX_US = 1, 100_000_000
_DIGITS = 3
_ALL = 100.0


def _library() -> Any:  # noqa: ANN401  the library has no types
    """The HdrHistogram package, which the server itself does not need.

    Raises:
        BenchError: It is not installed.
    """
    check_installed("hdrh")
    from hdrh.histogram import HdrHistogram  # noqa: PLC0415  see above

    return HdrHistogram


class Histogram:
    """Counts of latencies. The encoded form is HdrHistogram's standard, which every HdrHistogram tool reads."""

    def __init__(self, recorded: HdrHistogram | None = None) -> None:
        """Starts empty, or from recorded latencies."""
        self._recorded = recorded or _library()(_MIN_US, _MAX_US, _DIGITS)

    @classmethod
    def decoded(cls, text: str) -> Self:
        """Decodes the standard form, in microseconds."""
        return cls(_library().decode(text))

    def encoded(self) -> str:
        """The standard form: compressed, in base64."""
        encoded: bytes = self._recorded.encode()
        return encoded.decode()

    def __len__(self) -> int:
        return int(self._recorded.get_total_count())

    def record(self, seconds: Iterable[float]) -> None:
        """Adds latencies, clamped to the range of the histogram."""
        for value in seconds:
            self._recorded.record_value(min(_MAX_US, max(_MIN_US, round(value * 1e6))))

    def percentile_ms(self, percent: float) -> float:
        """The latency percentile; NaN if nothing was recorded."""
        return float(self._recorded.get_value_at_percentile(percent)) / 1e3 if len(self) else math.nan

    def resolves(self, percent: float) -> bool:
        """Whether at least one latency lies above the percentile. Otherwise the percentile is just the maximum."""
        return len(self) * (_ALL - percent) >= _ALL - 1e-9

    def max_ms(self) -> float:
        return float(self._recorded.get_max_value()) / 1e3 if len(self) else math.nan

    def mean_ms(self) -> float:
        return float(self._recorded.get_mean_value()) / 1e3 if len(self) else math.nan

    def within(self, limit_ms: float) -> int:
        """Number of latencies up to the limit."""
        values, counts = self.distribution()
        return int(counts[values <= limit_ms].sum())

    def distribution(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The distinct latencies in ms, ascending, and the count of each."""
        # The library's own iterator takes 10 ms per histogram, in Python.
        counts = np.frombuffer(self._recorded.counts, np.int64)
        indices = np.flatnonzero(counts)
        return _values_us(self._recorded.sub_bucket_half_count, indices) / 1e3, counts[indices]


def _values_us(half: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """The highest value of each index: from `2 * half` on, the bucket width doubles every `half` indexes."""
    bucket = np.maximum(indices // half - 1, 0)
    within = indices - bucket * half
    values: NDArray[np.float64] = ((within + 1) * 2.0**bucket) - 1
    return values
