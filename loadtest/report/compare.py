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

from bertserve.export.pages.tables import Table
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.report.noise import MIN_SLICES, TAIL, Redrawn, drawn
from bertserve.loadtest.report.result import MIN_SLICE_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bertserve.loadtest.report.result import Result

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


def _figures(result: Result, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Percentiles, throughput and failures, with a column for each version; see `Redrawn`."""
    runs = Redrawn(result, weights)
    percentiles = [np.where(runs.answered > 0, runs.percentile(percent), np.nan) for percent in PERCENTILES]
    return np.array([*percentiles, runs.answered / result.seconds, runs.failed_percent()])


def differences(first: Result, second: Result) -> list[Difference]:
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
    redrawn = [_figures(result, drawn(result, seed)) for seed, result in enumerate((first, second))]
    low, high = np.nanpercentile(redrawn[1] - redrawn[0], [TAIL, 100 - TAIL], axis=1).tolist()
    measured = (_figures(result, np.ones((1, len(result.slices))))[:, 0].tolist() for result in (first, second))
    names = [*(f"p{percent:g} ms" for percent in PERCENTILES), "answered/s", "failed %"]
    return [Difference(*row) for row in zip(names, *measured, low, high, strict=True)]


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
