"""Open-loop schedule: send times that are fixed before the run, so that replies cannot delay them.

A closed loop stops sending while it waits. A stalled server then receives fewer requests and looks better than users
experience it: coordinated omission (https://github.com/giltene/wrk2). Here each request has its scheduled time before
the run starts. Latency counts from that time, even if the request could only be sent later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bertserve.loadtest.generator.scenario import Phase, Scenario


def schedule(scenario: Scenario, rate: float, seed: int = 1) -> NDArray[np.float64]:
    """Send times of all requests, in seconds from the start, ascending. Deterministic.

    The k-th request is due when the integral of the rate reaches the k-th mark. For constant arrivals the marks are
    0.5, 1.5, 2.5, ...; for a Poisson process they are cumulative sums of exponential numbers with mean 1.

    Args:
        scenario: Its phases and its kind of arrivals.
        rate: Requests per second where a phase's share is 1.
        seed: Varies the gaps of Poisson arrivals; constant arrivals ignore it.
    """
    expected = rate * sum(_area(phase) for phase in scenario.phases)
    if scenario.arrivals == "constant":
        marks = np.arange(0.5, expected)
    else:
        dice = np.random.default_rng(seed)
        # Ten standard deviations above the expected count, so the marks always reach past the end.
        marks = np.cumsum(dice.exponential(size=int(expected + 10 * expected**0.5 + 10)))
    parts, begin_s, passed = [], 0.0, 0.0
    for phase in scenario.phases:
        area = rate * _area(phase)
        within = marks[(marks >= passed) & (marks < passed + area)] - passed
        parts.append(begin_s + _when(phase, rate, within))
        begin_s, passed = begin_s + phase.seconds, passed + area
    return np.concatenate(parts)


def choices(weights: Sequence[float] | NDArray[np.float64], count: int, seed: int = 1) -> NDArray[np.int64]:
    """The kind of each of `count` requests, drawn at random by weight. Deterministic."""
    shares = np.asarray(weights, np.float64)
    return np.random.default_rng([seed, len(shares)]).choice(len(shares), count, p=shares / shares.sum())


def _area(phase: Phase) -> float:
    return phase.seconds * (phase.begin + phase.end) / 2


def _when(phase: Phase, rate: float, marks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Times at which the integral of a phase's rate reaches the marks: the positive root of a quadratic equation.

    This form of the root avoids division by zero for constant phases and for phases that start at 0.
    """
    begin, slope = rate * phase.begin, rate * (phase.end - phase.begin) / phase.seconds
    root = np.sqrt(np.maximum(begin * begin + 2 * slope * marks, 0.0))
    times: NDArray[np.float64] = 2 * marks / np.maximum(begin + root, np.finfo(np.float64).tiny)
    return times
