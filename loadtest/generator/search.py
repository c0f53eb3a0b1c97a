"""The search for capacity: the highest rate at which every objective holds.

First the rate doubles until an objective is missed, then the space between is halved until it is narrow. Chance
decides a single run, so a miss counts only when two of three runs miss, and both sides of the edge are measured
three times with other arrivals: capacity is a rate that held in most of its runs, below one that was missed in most
of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from loadtest.generator.scenario import Phase
from loadtest.report.capacity import Capacity, Point

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadtest.generator.measure import Measurement
    from loadtest.generator.scenario import Scenario
    from loadtest.report.progress import Progress

_NARROW = 1.08
"""The search ends when the rates on both sides of the edge are so near."""

_RUNS_AT_THE_EDGE = 3
_MOST_RATE = 200_000.0
_LEAST_RATE = 1.0


def search(measurement: Measurement, scenario: Scenario, progress: Progress) -> Capacity:
    """Searches from the scenario's rate on, with even loads as long as the scenario.

    Raises:
        BenchError: A generator failed.
    """
    even = dataclasses.replace(scenario, phases=(Phase(scenario.seconds, 1, 1),))
    found = Capacity(measurement.facts(even, scenario.rate, measurement.seed), [str(one) for one in measurement.slo])
    seeds = itertools.count(measurement.seed)

    def held(rate: float) -> bool:
        progress.prefix = f"run {len(found.points) + 1}, {rate:.1f}/s, "
        result = measurement.run(even, rate, next(seeds), progress.show, check=False)
        found.points.append(Point.of(measurement.slo, rate, result))
        return found.points[-1].held

    def holds(rate: float) -> bool:
        # A neighbour on the machine makes a run miss, hardly ever hold: only a miss is doubted, and takes two of three.
        return held(rate) or (held(rate) and held(rate))

    low, high = bracket(scenario.rate, holds)
    while True:
        low, high = narrowed(low, high, holds, _NARROW)
        for rate in filter(None, (low, high)):
            for _ in range(found.runs(rate), _RUNS_AT_THE_EDGE):
                held(rate)
        if low == found.highest:
            return found
        # The lower side did not stand its repetition: the edge lies below it.
        low, high = found.highest, found.lowest_missed


def bracket(rate: float, holds: Callable[[float], bool]) -> tuple[float | None, float | None]:
    """A rate that holds and one that does not, at most a factor of 2 apart; None where there is none."""
    if holds(rate):
        while rate < _MOST_RATE:
            if not holds(2 * rate):
                return rate, 2 * rate
            rate *= 2
        return rate, None
    while rate > _LEAST_RATE:
        if holds(rate / 2):
            return rate / 2, rate
        rate /= 2
    return None, rate


def narrowed(
    low: float | None, high: float | None, holds: Callable[[float], bool], near: float
) -> tuple[float | None, float | None]:
    """The two rates of a bracket, at most a factor of `near` apart; as they are where one is missing."""
    while low and high and high / low > near:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high
