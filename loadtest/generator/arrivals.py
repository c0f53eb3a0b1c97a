"""When requests are sent in an open loop: a schedule made beforehand, which no reply can slow.

A closed loop stops sending while it waits, so a server that stalls is asked less and looks better than its users
find it: coordinated omission (https://github.com/giltene/wrk2). Here a request has its time before the run
starts, and its latency counts from that time even where it could only be sent later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadtest.generator.scenario import Phase, Scenario


def schedule(scenario: Scenario, rate: float, seed: int = 1) -> NDArray[np.float64]:
    """The times of all requests, in seconds from the start, ascending; equal for equal arguments.

    The k-th request comes where the integral of the rate reaches the k-th of a row of numbers: for constant
    arrivals 0.5, 1.5, 2.5, ..., for a Poisson process sums of exponential numbers of mean 1.

    Args:
        scenario: Its phases and its kind of arrivals.
        rate: Requests a second where a phase's share is 1.
        seed: Another seed, other gaps; constant arrivals have none to vary.
    """
    expected = rate * sum(_area(phase) for phase in scenario.phases)
    if scenario.arrivals == "constant":
        marks = np.arange(0.5, expected)
    else:
        dice = np.random.default_rng(seed)
        # Ten standard deviations more than expected: beyond the end, whatever the dice say.
        marks = np.cumsum(dice.exponential(size=int(expected + 10 * expected**0.5 + 10)))
    parts, begin_s, passed = [], 0.0, 0.0
    for phase in scenario.phases:
        area = rate * _area(phase)
        within = marks[(marks >= passed) & (marks < passed + area)] - passed
        parts.append(begin_s + _when(phase, rate, within))
        begin_s, passed = begin_s + phase.seconds, passed + area
    return np.concatenate(parts)


def choices(weights: Sequence[float] | NDArray[np.float64], count: int, seed: int = 1) -> NDArray[np.int64]:
    """Which of several kinds each of `count` requests is, drawn by weight; equal for equal arguments."""
    shares = np.asarray(weights, np.float64)
    return np.random.default_rng([seed, len(shares)]).choice(len(shares), count, p=shares / shares.sum())


def _area(phase: Phase) -> float:
    return phase.seconds * (phase.begin + phase.end) / 2


def _when(phase: Phase, rate: float, marks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where the integral of a phase's rate reaches the marks: the positive root of a quadratic equation.

    Written so that neither an even phase nor one that starts from nothing divides by zero.
    """
    begin, slope = rate * phase.begin, rate * (phase.end - phase.begin) / phase.seconds
    root = np.sqrt(np.maximum(begin * begin + 2 * slope * marks, 0.0))
    times: NDArray[np.float64] = 2 * marks / np.maximum(begin + root, np.finfo(np.float64).tiny)
    return times
