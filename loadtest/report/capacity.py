"""What a search for capacity found: every run of it, and the edge between rates that hold and rates that do not."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loadtest.report.slo import judge

if TYPE_CHECKING:
    from loadtest.report.result import Result
    from loadtest.report.slo import Objective


@dataclass(slots=True, frozen=True)
class Point:
    """One run of the search.

    Attributes:
        rate: Offered, in requests a second.
        held: Whether every objective was.
        trusted: Whether the generator kept its schedule.
        p50_ms: Median latency; not a number where nothing was answered.
        p99_ms: 99th percentile of it.
        good_per_s: Goodput.
        failed_percent: Requests without an answer, of those that were sent.
    """

    rate: float
    held: bool
    trusted: bool
    p50_ms: float
    p99_ms: float
    good_per_s: float
    failed_percent: float

    @classmethod
    def of(cls, slo: tuple[Objective, ...], rate: float, result: Result) -> Point:
        """The point that a run gives."""
        return cls(
            rate,
            all(verdict.held for verdict in judge(slo, result)),
            not result.generator_was_the_limit,
            result.latency.percentile_ms(50),
            result.latency.percentile_ms(99),
            result.good_per_s,
            result.failed_percent,
        )

    def text(self) -> str:
        """A line for a terminal."""
        verdict = ("held" if self.held else "missed") + ("" if self.trusted else " (generator late)")
        times = f"p50 {self.p50_ms:8.2f}  p99 {self.p99_ms:8.2f} ms"
        return f"{self.rate:10.1f}/s  {times}  failed {self.failed_percent:.2f}%  {verdict}"


@dataclass(slots=True)
class Capacity:
    """What a search found.

    Attributes:
        facts: What was searched with, in words.
        slo: The objectives, in words.
        points: Every run, in order.
    """

    facts: dict[str, str]
    slo: list[str]
    points: list[Point] = field(default_factory=list)

    def runs(self, rate: float) -> int:
        """How often a rate was run."""
        return sum(point.rate == rate for point in self.points)

    def held(self, rate: float) -> bool:
        """Whether most of the runs at a rate held the objectives."""
        runs = [point.held for point in self.points if point.rate == rate]
        return 2 * sum(runs) > len(runs)

    @property
    def highest(self) -> float | None:
        """Capacity: the highest rate that held, below the lowest that did not; None where none held."""
        rates = {point.rate for point in self.points}
        missed = self.lowest_missed
        return max((r for r in rates if self.held(r) and (missed is None or r < missed)), default=None)

    @property
    def lowest_missed(self) -> float | None:
        """The lowest rate that did not hold; None where every one did."""
        return min((point.rate for point in self.points if not self.held(point.rate)), default=None)

    def confidence(self) -> str:
        """How sure the edge is, in words."""
        words = []
        for rate, what in ((self.highest, "held"), (self.lowest_missed, "missed")):
            runs = [point for point in self.points if point.rate == rate]
            if runs:
                count = sum(point.held == (what == "held") for point in runs)
                words.append(f"{what} in {count} of {len(runs)} runs at {rate:.1f}/s")
        if any(not point.trusted for point in self.points if point.rate in {self.highest, self.lowest_missed}):
            words.append("in some of these runs the generator was late")
        return "; ".join(words)

    def text(self) -> str:
        """What a terminal shows."""
        lines = [point.text() for point in sorted(self.points, key=lambda point: point.rate)]
        found = f"{self.highest:.1f} requests a second" if self.highest else "none: the lowest rate tried misses it too"
        return "\n".join([*lines, "", f"capacity at {', '.join(self.slo)}: {found}", self.confidence()])

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "format": "bertserve-capacity-1",
            "facts": self.facts,
            "slo": self.slo,
            "capacity_per_s": self.highest,
            "lowest_missed_per_s": self.lowest_missed,
            "confidence": self.confidence(),
            # JSON knows no NaN: a run without answers has no percentiles.
            "points": [
                {name: None if value != value else value for name, value in dataclasses.asdict(point).items()}  # noqa: PLR0124
                for point in self.points
            ],
        }
