"""What a search for capacity found: every run of it, and the edge between rates that hold and rates that do not."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from export.pages.tables import Table, untitled
from loadtest.report.noise import interval, surely
from loadtest.report.slo import Objective, judge

if TYPE_CHECKING:
    from loadtest.report.result import Result

RUNS = 3
"""Of a rate at most: the majority of them decides."""
_BAND = 1.2
"""Where noise decides at rates that are further apart than this, the rate does not decide."""
_BAR = 24
_P99 = Objective("p99", 99.0, math.inf)
_VOTES = {True: "held", False: "missed", None: "within noise"}


@dataclass(slots=True, frozen=True)
class Point:
    """One run of the search.

    Attributes:
        rate: Offered, in requests a second.
        held: Whether every objective was.
        sure: The same by more than the noise of the run; None where noise decides.
        trusted: Whether the generator kept its schedule.
        p50_ms: Median latency; not a number where nothing was answered.
        p99_ms: 99th percentile of it.
        p99_low_ms: Least p99 that noise explains.
        p99_high_ms: Greatest.
        good_per_s: Goodput.
        failed_percent: Requests without an answer, of those that were sent.
    """

    rate: float
    held: bool
    sure: bool | None
    trusted: bool
    p50_ms: float
    p99_ms: float
    p99_low_ms: float
    p99_high_ms: float
    good_per_s: float
    failed_percent: float

    @classmethod
    def of(cls, slo: tuple[Objective, ...], rate: float, result: Result) -> Point:
        """The point that a run gives."""
        p99_ms = result.latency.percentile_ms(99)
        bounds = interval(_P99, result) if len(result.latency) else None
        return cls(
            rate,
            all(verdict.held for verdict in judge(slo, result)),
            surely(slo, result),
            not result.generator_was_the_limit,
            result.latency.percentile_ms(50),
            p99_ms,
            *(bounds or (p99_ms, p99_ms)),
            result.good_per_s,
            result.failed_percent,
        )

    def verdict(self) -> str:
        """In a word or two."""
        return _VOTES[self.sure] + ("" if self.trusted else ", generator late")


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

    def at(self, rate: float) -> list[Point]:
        """The runs of a rate."""
        return [point for point in self.points if point.rate == rate]

    def held(self, rate: float) -> bool | None:
        """Whether most of the runs at a rate surely held the objectives, or missed them; None where neither."""
        votes = [point.sure for point in self.at(rate)]
        return next((vote for vote in (True, False) if 2 * votes.count(vote) > len(votes)), None)

    def is_settled(self, rate: float) -> bool:
        """Whether another run could not change what is known of a rate.

        A neighbour on the machine makes a run miss, hardly ever hold: one run is enough to hold, a miss takes two.
        """
        votes = [point.sure for point in self.at(rate)]
        return votes == [True] or len(votes) >= RUNS or max(map(votes.count, (True, False, None))) > 1

    @property
    def rates(self) -> list[float]:
        """Those that were run, ascending."""
        return sorted({point.rate for point in self.points})

    @property
    def highest(self) -> float | None:
        """Capacity: the highest rate that held, below the lowest that did not; None where none held."""
        least = min((rate for rate in self.rates if not self.held(rate)), default=math.inf)
        return max((rate for rate in self.rates if rate < least), default=None)

    @property
    def lowest_missed(self) -> float | None:
        """The lowest rate that was surely missed; None where none was."""
        return min((rate for rate in self.rates if self.held(rate) is False), default=None)

    @property
    def doubtful(self) -> list[float]:
        """The rates at which noise decides, by one run or from run to run."""
        return [
            rate
            for rate in self.rates
            if self.held(rate) is None or {True, False} <= {point.sure for point in self.at(rate)}
        ]

    @property
    def is_decided(self) -> bool:
        """Whether the rate decides the objective: noise does at near rates alone, and no rate holds above a miss."""
        doubtful = self.doubtful
        above = max((rate for rate in self.rates if self.held(rate)), default=0.0)
        return (not doubtful or doubtful[-1] <= _BAND * doubtful[0]) and above <= (self.lowest_missed or math.inf)

    def confidence(self) -> str:
        """How sure the edge is, in words."""
        words = []
        edge = {self.highest: (True, "held"), self.lowest_missed: (False, "missed")}
        for rate, (vote, what) in edge.items():
            if rate is not None:
                runs = self.at(rate)
                words.append(f"{what} in {sum(p.sure is vote for p in runs)} of {len(runs)} runs at {rate:.1f}/s")
        if any(not point.trusted for point in self.points if point.rate in edge):
            words.append("in some of these runs the generator was late")
        return "; ".join(words)

    def verdict(self) -> str:
        """The answer in a sentence or two."""
        if self.is_decided:
            if self.highest is None:
                return "none of the rates tried held: the lowest one misses it too"
            return f"{self.highest:.1f} requests a second"
        low, high = self.highest, self.lowest_missed
        between = [
            rate for rate in self.rates if (low or 0.0) < rate and (high is None or rate < high)
        ] or self.doubtful
        words = f"not decided by the rate: from {between[0]:.1f} to {between[-1]:.1f}/s noise decides"
        held = "no rate tried holds it surely" if low is None else f"it holds surely up to {low:.1f}/s"
        missed = "no rate tried misses it surely" if high is None else f"is missed surely from {high:.1f}/s on"
        return f"{words}; {held}, {missed}. Measure longer (--duration), or ask for another limit"

    def shape(self) -> str:
        """How the p99 grows with the rate, in a sentence."""
        curve = [(rate, statistics.median(point.p99_ms for point in self.at(rate))) for rate in self.rates]
        curve = [(rate, p99) for rate, p99 in curve if math.isfinite(p99)]
        if not curve:
            return "nothing was answered"
        first = curve[0][1]
        knee = next((rate for rate, p99 in curve if p99 > 2 * first), None)
        start = f"p99 is {first:.2f} ms at {curve[0][0]:.1f}/s"
        if knee is None:
            return f"{start}, and at no rate up to {curve[-1][0]:.1f}/s twice that: the curve is flat"
        return f"{start}, and more than twice that from {knee:.1f}/s on"

    def lines(self) -> list[str | Table]:
        """What a terminal shows."""
        known = {"texts": "requests", "engine": "engine"}
        columns = ("rate/s", "p50 ms", "p99 ms", "noise", "failed %", "", "objectives", "runs")
        return [
            *(f"{name}: {self.facts[fact]}" for name, fact in known.items() if fact in self.facts),
            untitled(columns, [self._row(rate) for rate in self.rates]),
            f"shape: {self.shape()}",
            "",
            f"capacity at {', '.join(self.slo)}: {self.verdict()}",
            self.confidence(),
        ]

    def _row(self, rate: float) -> tuple[str, ...]:
        """A rate, with a bar as long as the logarithm of its p99."""
        runs = self.at(rate)
        p50, p99, failed = (
            statistics.median(getattr(point, name) for point in runs) for name in ("p50_ms", "p99_ms", "failed_percent")
        )
        every = [point.p99_ms for point in self.points if math.isfinite(point.p99_ms)]
        least, most = min(every, default=1.0), max(every, default=1.0)
        share = math.log(p99 / least) / math.log(most / least) if math.isfinite(p99) and most > least else 0.0
        return (
            f"{rate:.1f}",
            f"{p50:.2f}",
            f"{p99:.2f}",
            f"{min(p.p99_low_ms for p in runs):.2f} to {max(p.p99_high_ms for p in runs):.2f}",
            f"{failed:.2f}",
            f"{'#' * round(1 + _BAR * share):<{_BAR + 1}}",
            _VOTES[self.held(rate)] + ("" if all(point.trusted for point in runs) else ", generator late"),
            f"{len(runs)}",
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "format": "bertserve-capacity-1",
            "facts": self.facts,
            "slo": self.slo,
            "capacity_per_s": self.highest,
            "lowest_missed_per_s": self.lowest_missed,
            "is_decided": self.is_decided,
            "verdict": self.verdict(),
            "shape": self.shape(),
            "confidence": self.confidence(),
            # JSON knows neither NaN nor infinity: a run without answers has no percentiles.
            "points": [
                {
                    name: None if isinstance(value, float) and not math.isfinite(value) else value
                    for name, value in dataclasses.asdict(point).items()
                }
                for point in self.points
            ],
        }
