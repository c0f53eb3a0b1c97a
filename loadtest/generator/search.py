"""Capacity search: the highest rate at which every objective holds.

First the rate doubles until an objective is missed; then bisection narrows the bracket. A run whose noise
(`report/noise.py`) crosses a limit decides nothing. A miss counts only if two of three runs miss. Both sides of the
edge are measured three times with different arrivals. If noise decides over a wide range of rates, the search ends:
more runs would find a rate by chance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING

from bertserve.loadtest.generator.scenario import Phase
from bertserve.loadtest.report.capacity import RUNS, Capacity, Point

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.loadtest.generator.measure import Measurement
    from bertserve.loadtest.generator.scenario import Scenario
    from bertserve.loadtest.report.progress import Progress

_NARROW = 1.08
"""The search ends when the ratio of the rates on both sides of the edge is at most this."""

_MAX_RUNS = 32
_USUAL_RUNS = (8, 16)
_START_S = 1.5
"""Start-up time of a run, before its schedule begins."""
_MAX_STEPS = 3
"""Maximum steps from a range of rates where noise decides to rates that are certain."""
_MAX_RATE = 200_000.0
_MIN_RATE = 1.0


class _EndError(Exception):
    """There is nothing more to find, or no run is left."""


def plan(scenario: Scenario) -> str:
    """The plan of a search, in one sentence."""
    least, usual, most = (count * (scenario.seconds + _START_S) / 60 for count in (*_USUAL_RUNS, _MAX_RUNS))
    return (
        f"searching from {scenario.rate:g}/s with runs of {scenario.seconds:g} s, up to {RUNS} at a rate: usually "
        f"{_USUAL_RUNS[0]} to {_USUAL_RUNS[1]} runs ({least:.1f} to {usual:.1f} minutes), at most {_MAX_RUNS} "
        f"({most:.1f} minutes)"
    )


def search(measurement: Measurement, scenario: Scenario, progress: Progress) -> Capacity:
    """Searches from the scenario's rate, with constant loads as long as the scenario.

    Raises:
        BenchError: A generator failed.
    """
    even = dataclasses.replace(scenario, phases=(Phase(scenario.seconds, 1, 1),))
    found = Capacity(measurement.facts(even, scenario.rate, measurement.seed), [str(one) for one in measurement.slo])
    searching = _Search(measurement, even, progress, found)
    with contextlib.suppress(_EndError):
        searching.edge()
    with contextlib.suppress(_EndError):
        searching.surroundings()
    return found


class _Search:
    def __init__(self, measurement: Measurement, even: Scenario, progress: Progress, found: Capacity) -> None:
        self._measurement = measurement
        self._even = even
        self._progress = progress
        self._found = found
        self._seeds = itertools.count(measurement.seed)

    def edge(self) -> None:
        """Finds adjacent rates, of which the lower holds and the higher does not.

        Raises:
            _EndError: Noise decides, or no run is left.
        """
        found = self._found
        low, high = bracket(self._even.rate, self._holds)
        while True:
            low, high = narrowed(low, high, self._holds, _NARROW)
            for rate in filter(None, (low, high)):
                while len(found.at(rate)) < RUNS:
                    self._run(rate)
            if low == found.highest or not found.is_decided:
                return
            # The lower rate failed its repetition, so the edge is below it.
            low, high = found.highest, min(rate for rate in found.rates if not found.held(rate))
            if low is None:
                low, high = bracket(high / 2, self._holds)

    def surroundings(self) -> None:
        """Looks for certain rates around a range in which noise decides.

        Raises:
            _EndError: No run is left.
        """
        found = self._found
        for _ in range(0 if found.is_decided else _MAX_STEPS):
            if found.highest is None and found.rates[0] > _MIN_RATE:
                self._measure(found.rates[0] / 2)
            if found.lowest_missed is None:
                self._measure(found.rates[-1] * 2)

    def _holds(self, rate: float) -> bool:
        self._measure(rate)
        if not self._found.is_decided:
            raise _EndError
        return self._found.held(rate) is True

    def _measure(self, rate: float) -> None:
        while not self._found.at(rate) or not self._found.is_settled(rate):
            self._run(rate)

    def _run(self, rate: float) -> None:
        points = self._found.points
        if len(points) >= _MAX_RUNS:
            raise _EndError
        self._progress.prefix = f"run {len(points) + 1} of at most {_MAX_RUNS}, {rate:.1f}/s, "
        result = self._measurement.run(self._even, rate, next(self._seeds), self._progress.show, check=False)
        points.append(Point.of(self._measurement.slo, rate, result))


def bracket(rate: float, holds: Callable[[float], bool]) -> tuple[float | None, float | None]:
    """A rate that holds and one that does not, at most a factor of 2 apart; None for a missing one."""
    if holds(rate):
        while rate < _MAX_RATE:
            if not holds(2 * rate):
                return rate, 2 * rate
            rate *= 2
        return rate, None
    while rate > _MIN_RATE:
        if holds(rate / 2):
            return rate / 2, rate
        rate /= 2
    return None, rate


def narrowed(
    low: float | None, high: float | None, holds: Callable[[float], bool], near: float
) -> tuple[float | None, float | None]:
    """Narrows a bracket to at most a factor of `near`; a bracket with a missing rate stays as it is."""
    while low and high and high / low > near:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high
