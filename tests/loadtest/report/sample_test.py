from __future__ import annotations

import pytest

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.report.sample import Spread, Window, percentile, sample_of


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([1.0], 50, 1.0),
        ([1.0], 99, 1.0),
        ([1.0, 2.0], 50, 1.0),
        ([1.0, 2.0, 3.0], 50, 2.0),
        (list(range(1, 101)), 99, 99),
        (list(range(1, 1001)), 99, 990),
        (list(range(1, 11)), 99, 10),
        (list(range(1, 11)), 100, 10),
    ],
)
def test_percentile_is_the_nearest_rank(values: list[float], percent: float, expected: float) -> None:
    """A percentile is a value that was measured, the least that so many do not exceed."""
    assert percentile(values, percent) == expected


def test_a_spread_is_the_median_between_the_extremes() -> None:
    """One lucky or unlucky round moves the ends of a spread, not its middle."""
    assert Spread.of([3.0, 1.0, 100.0]) == Spread(3.0, 1.0, 100.0, 3)
    assert Spread.of([2.0, 4.0]).median == 3.0


def test_only_replies_within_the_window_count() -> None:
    """The warm-up and what ends after the window change neither rate nor percentiles."""
    exchanges = [(0.0, 0.9), (0.9, 1.1), (1.1, 1.3), (1.3, 1.6), (1.6, 9.0)]
    sample = sample_of(exchanges, Window(1.0, 3.0), cpu_s=0.001)
    assert sample.requests == 3
    assert sample.exchanges == 5
    assert sample.per_s == 1.5
    assert sample.p50_ms == pytest.approx(200)
    assert sample.p99_ms == pytest.approx(300)
    assert sample.client_cpu_us == pytest.approx(200)


def test_a_window_begins_after_the_warm_up() -> None:
    """A measurement is as long as was asked for, warm-up not included."""
    assert Window.after(10.0, 0.5, 2.0) == Window(10.5, 12.5)


def test_a_window_without_a_reply_is_an_error() -> None:
    """No figure is made up from nothing."""
    with pytest.raises(BenchError, match="no reply within 1 s"):
        sample_of([(0.0, 0.5)], Window(1.0, 2.0), cpu_s=0.0)
