"""The last minute: rates and quantiles from counts, on a clock that the test holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.serving.inference.requests import Outcome, Timings
from bertserve.serving.telemetry.metrics import Metrics
from bertserve.serving.telemetry.recent import STEP_S, STEPS, Recent, upper_bound


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def read(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def recent(metrics: Metrics, clock: Clock) -> Recent:
    return Recent(metrics, clock.read)


def answered(metrics: Metrics, count: int, total_ms: float, texts: int = 1) -> None:
    timings = Timings(tokenize_us=50.0, queue_us=0.0, compute_us=total_ms * 500, total_us=total_ms * 1e3)
    for _ in range(count):
        metrics.count_outcome(
            Outcome(np.zeros((texts, 2)), "m", "1", timings, tokens=8 * texts, truncated_tokens=0), "http"
        )


def test_before_the_first_request_there_are_no_latencies(recent: Recent) -> None:
    """Rates are zero, and quantiles null rather than a number that nobody measured."""
    report = recent.report()
    assert report["requests_per_s"] == report["errors_per_s"] == 0
    assert report["latency"]["request"] == {"p50_ms": None, "p90_ms": None, "p99_ms": None}
    assert report["steps"]["p99_ms"] == []


def test_rates_count_from_the_start_at_first(clock: Clock, metrics: Metrics, recent: Recent) -> None:
    """Ten requests of two texts in five seconds."""
    answered(metrics, 10, 2.0, texts=2)
    metrics.refused("overloaded", "http", "m")
    clock.now += 5
    report = recent.report()
    assert report["seconds"] == 5
    assert (report["requests_per_s"], report["texts_per_s"], report["tokens_per_s"]) == (2, 4, 32)
    assert report["errors_per_s"] == 0.2


def test_what_is_older_than_a_minute_is_forgotten(clock: Clock, metrics: Metrics, recent: Recent) -> None:
    """The window slides by steps; the totals keep everything."""
    answered(metrics, 100, 50.0)
    for step in range(STEPS + 1):
        clock.now += STEP_S
        recent.look()
        if step == 0:
            answered(metrics, 30, 1.0)
    report, totals = recent.report(), recent.totals()
    assert report["seconds"] == STEPS * STEP_S
    assert report["requests_per_s"] == pytest.approx(30 / 60)
    assert report["latency"]["request"]["p99_ms"] == pytest.approx(1.0, abs=0.11)
    assert totals["requests"] == 130
    assert totals["latency"]["request"]["p99_ms"] == pytest.approx(50, rel=0.25)
    assert totals["seconds"] == (STEPS + 1) * STEP_S


def test_each_step_has_its_own_figures(clock: Clock, metrics: Metrics, recent: Recent) -> None:
    """Exactly those of its requests; a quiet step says null, not the latency of the one before."""
    for count, total_ms in ((4, 1.0), (0, 0.0), (8, 2.5)):
        answered(metrics, count, total_ms)
        clock.now += STEP_S
        recent.look()
    steps = recent.report()["steps"]
    assert steps["requests_per_s"] == [2, 0, 4]
    assert steps["p99_ms"] == [1.0, None, 2.5]


def test_errors_are_told_by_reason(metrics: Metrics, recent: Recent) -> None:
    for reason in ("overloaded", "overloaded", "deadline_exceeded"):
        metrics.refused(reason, "grpc", "")
    metrics.engine_died()
    totals = recent.totals()
    assert totals["errors"] == {"overloaded": 2, "deadline_exceeded": 1}
    assert totals["engine_restarts"] == 1


def test_few_requests_have_exact_quantiles(metrics: Metrics, recent: Recent) -> None:
    """A bucket of the histogram would turn 14.2 ms into anything from 12.5 to 15."""
    answered(metrics, 1, 14.2)
    report = recent.report()
    assert report["latency"]["request"] == {"p50_ms": 14.2, "p90_ms": 14.2, "p99_ms": 14.2}
    assert report["latency"]["compute"] == {"p50_ms": 7.1, "p90_ms": 7.1, "p99_ms": 7.1}
    assert report["latency_of"] == {"requests": 1, "exact": True}
    times = np.random.default_rng(0).lognormal(2.0, 1.0, 400).tolist()
    for total_ms in times:
        answered(metrics, 1, total_ms)
    report = recent.report()
    true = np.quantile([14.2, *times], [0.5, 0.9, 0.99], method="inverted_cdf")
    assert list(report["latency"]["request"].values()) == pytest.approx(true.tolist(), abs=0.0006)


def test_of_many_requests_the_bounds_are_told(metrics: Metrics, recent: Recent) -> None:
    """None of them lies above what is said of it, and it is told that this is a bound."""
    answered(metrics, 1001, 14.2)
    report = recent.report()
    assert report["latency_of"] == {"requests": 1001, "exact": False}
    assert set(report["latency"]["request"].values()) == {15.0}


@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_bound_is_that_of_the_true_quantile(values: list[float], share: float) -> None:
    """Whatever was counted; beyond the last bound there is only that bound to tell."""
    bounds = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    places = np.searchsorted(bounds, values)
    counts = np.bincount(places, minlength=len(bounds) + 1).tolist()
    true = float(np.quantile(values, share, method="inverted_cdf"))
    bucket = int(np.searchsorted(bounds, true))
    assert upper_bound(bounds, counts, share) == bounds[min(bucket, len(bounds) - 1)]
