"""Compares two reports and tells whether differences exceed noise.

Requests at the same moment meet the same server state, so they are not independent samples. A test on single requests
would make every difference look certain. Instead, slices of time are resampled (a block bootstrap, Künsch 1989): 2,000
times, each run is redrawn with replacement from its slices. The interval is the middle 95% of the differences between
the redrawn figures. A difference exceeds noise if its interval excludes 0. Variation between whole runs, such as
another machine or another hour, is not visible in one run each: repeat the runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from export.pages.tables import Table
from loadtest.errors import BenchError
from loadtest.report.noise import DRAWS, MIN_SLICES, TAIL, counts_of
from loadtest.report.result import MIN_SLICE_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadtest.report.result import Result

PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(slots=True, frozen=True)
class Difference:
    """One figure in two runs.

    Attributes:
        what: The figure and its unit.
        first: Value in the first run.
        second: Value in the second run.
        low: Lower end of the interval of the difference (second minus first).
        high: Upper end of the interval.
    """

    what: str
    first: float
    second: float
    low: float
    high: float

    @property
    def is_more_than_noise(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


class _Run:
    """The counts of a run's slices, and resampled versions of them."""

    def __init__(self, result: Result, values: NDArray[np.float64]) -> None:
        self._values = values
        self._slice_s = result.slice_s
        self._counts = counts_of(result, values)
        self._failed = np.array([part.failed for part in result.slices])

    def figures(self, drawn: NDArray[np.int64]) -> list[float]:
        """Percentiles, throughput and failures of the drawn slices."""
        # Counts how often each slice is drawn instead of copying slices.
        weights = np.bincount(drawn, minlength=len(self._counts))
        counts = np.cumsum(weights @ self._counts)
        answered, failed = int(counts[-1]), int(weights @ self._failed)
        ranks = [max(1, int(answered * percent / 100 + 0.5)) for percent in PERCENTILES]  # as HdrHistogram counts
        percentiles = [float(self._values[np.searchsorted(counts, rank)]) for rank in ranks] if answered else []
        return [
            *(percentiles or [float("nan")] * len(PERCENTILES)),
            answered / (len(drawn) * self._slice_s),
            100 * failed / max(1, answered + failed),
        ]

    def all(self) -> list[float]:
        return self.figures(np.arange(len(self._counts)))

    def redrawn(self, dice: np.random.Generator) -> NDArray[np.float64]:
        count = len(self._counts)
        return np.array([self.figures(dice.integers(count, size=count)) for _ in range(DRAWS)])


def differences(first: Result, second: Result, seed: int = 1) -> list[Difference]:
    """The figures of two runs, with the intervals of their differences.

    Raises:
        BenchError: A run is too short, or answered nothing.
    """
    for result in (first, second):
        if len(result.slices) < MIN_SLICES:
            raise BenchError(
                f"a run of {result.seconds:g} s is too short to tell differences from noise; the minimum is"
                f" {MIN_SLICES * MIN_SLICE_S:g} s"
            )
        if not len(result.latency):
            raise BenchError("a run without answers cannot be compared")
    values = np.union1d(*(result.latency.distribution()[0] for result in (first, second)))
    runs = [_Run(result, values) for result in (first, second)]
    dice = np.random.default_rng(seed)
    spread = runs[1].redrawn(dice) - runs[0].redrawn(dice)
    low, high = np.nanpercentile(spread, [TAIL, 100 - TAIL], axis=0)
    names = [*(f"p{percent:g} ms" for percent in PERCENTILES), "answered/s", "failed %"]
    return [
        Difference(*row) for row in zip(names, runs[0].all(), runs[1].all(), low.tolist(), high.tolist(), strict=True)
    ]


def lines(first: Result, second: Result) -> list[str | Table]:
    """The comparison for the terminal.

    Raises:
        BenchError: See `differences`.
    """
    changed = other_facts(first, second)
    return [table_of(first, second), *(["", "The loads differ:", *changed] if changed else [])]


def as_json(first: Result, second: Result) -> dict[str, Any]:
    """The comparison as plain JSON values.

    Raises:
        BenchError: See `differences`.
    """
    return {
        "format": "bertserve-compare-1",
        "facts": [first.facts, second.facts],
        "differences": [
            asdict(found) | {"is_more_than_noise": found.is_more_than_noise} for found in differences(first, second)
        ],
    }


def table_of(first: Result, second: Result) -> Table:
    """The figures with their differences.

    Raises:
        BenchError: See `differences`.
    """
    rows = [
        (
            found.what,
            f"{found.first:.2f}",
            f"{found.second:.2f}",
            f"{found.second - found.first:+.2f}",
            f"{found.low:+.2f} to {found.high:+.2f}",
            "yes" if found.is_more_than_noise else "no",
        )
        for found in differences(first, second)
    ]
    note = "95% intervals are from a bootstrap over time slices; variation between runs is not included."
    columns = ("figure", "A", "B", "B - A", "interval", "more than noise")
    return Table("B against A", note, columns, rows, words=1)


def other_facts(first: Result, second: Result) -> list[str]:
    """Differences between the conditions of both runs."""
    return [
        f"{name}: {first.facts.get(name)} / {second.facts.get(name)}"
        for name in ("target", "task", "protocol", "scenario", "rate", "phases", "requests")
        if first.facts.get(name) != second.facts.get(name)
    ]
