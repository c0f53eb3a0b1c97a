"""The result of a capacity search: all runs, and the edge between rates that hold and rates that miss."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bertserve.export.pages.tables import Table, untitled
from bertserve.loadtest.report.noise import interval, surely
from bertserve.loadtest.report.slo import Objective, judge

if TYPE_CHECKING:
    from bertserve.loadtest.report.result import Result

RUNS = 3
"""Maximum runs per rate; their majority decides."""
_BAND = 1.2
"""If noise decides at rates that differ by more than this factor, the result is undecided."""
_BAR = 24
_P99 = Objective("p99", 99.0, math.inf)
_VOTES = {True: "held", False: "missed", None: "within noise"}


@dataclass(slots=True, frozen=True)
class Point:
    """One run of the search.

    Attributes:
        rate: Offered load, in requests per second.
        held: Whether every objective held.
        sure: The same beyond the noise of the run; None if noise decides.
        trusted: Whether the generator kept its schedule.
        p50_ms: Median latency; NaN if nothing was answered.
        p99_ms: 99th percentile of the latency.
        p99_low_ms: Lowest p99 within noise.
        p99_high_ms: Highest p99 within noise.
        good_per_s: Goodput.
        failed_percent: Percentage of sent requests without an answer.
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
        """The point of a run."""
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
        """The verdict in one or two words."""
        return _VOTES[self.sure] + ("" if self.trusted else ", generator late")


@dataclass(slots=True)
class Capacity:
    """The result of a search.

    Attributes:
        facts: Conditions of the search, as text.
        slo: The objectives, as text.
        points: Every run, in order.
    """

    facts: dict[str, str]
    slo: list[str]
    points: list[Point] = field(default_factory=list)

    def at(self, rate: float) -> list[Point]:
        """The runs of a rate."""
        return [point for point in self.points if point.rate == rate]

    def held(self, rate: float) -> bool | None:
        """Whether most runs at a rate surely held (True) or surely missed (False) the objectives; None if neither."""
        votes = [point.sure for point in self.at(rate)]
        return next((vote for vote in (True, False) if 2 * votes.count(vote) > len(votes)), None)

    def is_settled(self, rate: float) -> bool:
        """Whether another run could not change the verdict on a rate.

        Other load on the machine can make a run miss, but hardly ever hold. So one run suffices to hold; a miss takes
        two.
        """
        votes = [point.sure for point in self.at(rate)]
        return votes == [True] or len(votes) >= RUNS or max(map(votes.count, (True, False, None))) > 1

    @property
    def rates(self) -> list[float]:
        """The measured rates, ascending."""
        return sorted({point.rate for point in self.points})

    @property
    def highest(self) -> float | None:
        """The capacity: the highest rate that held below the lowest that did not; None if none held."""
        least = min((rate for rate in self.rates if not self.held(rate)), default=math.inf)
        return max((rate for rate in self.rates if rate < least), default=None)

    @property
    def lowest_missed(self) -> float | None:
        """The lowest rate that surely missed; None if none did."""
        return min((rate for rate in self.rates if self.held(rate) is False), default=None)

    @property
    def doubtful(self) -> list[float]:
        """The rates at which noise decides, within a run or between runs."""
        return [
            rate
            for rate in self.rates
            if self.held(rate) is None or {True, False} <= {point.sure for point in self.at(rate)}
        ]

    @property
    def is_decided(self) -> bool:
        """Whether the rate decides the outcome.

        It does if noise decides only at rates close to each other, and no rate above a miss holds.
        """
        doubtful = self.doubtful
        above = max((rate for rate in self.rates if self.held(rate)), default=0.0)
        return (not doubtful or doubtful[-1] <= _BAND * doubtful[0]) and above <= (self.lowest_missed or math.inf)

    def confidence(self) -> str:
        """The confidence in the edge, as text."""
        words = []
        edge = {self.highest: (True, "held"), self.lowest_missed: (False, "missed")}
        for rate, (vote, what) in edge.items():
            if rate is not None:
                runs = self.at(rate)
                words.append(f"{what} in {sum(p.sure is vote for p in runs)} of {len(runs)} runs at {rate:.1f}/s")
        if any(not point.trusted for point in self.points if point.rate in edge):
            words.append("the load generator was late in some of these runs")
        return "; ".join(words)

    def verdict(self) -> str:
        """The result in one or two sentences."""
        if self.is_decided:
            if self.highest is None:
                return "none, no tested rate meets the SLO"
            return f"{self.highest:.1f} requests/s"
        low, high = self.highest, self.lowest_missed
        between = [
            rate for rate in self.rates if (low or 0.0) < rate and (high is None or rate < high)
        ] or self.doubtful
        words = f"undecided: from {between[0]:.1f} to {between[-1]:.1f}/s, noise decides"
        held = "no tested rate reliably meets it" if low is None else f"reliably met up to {low:.1f}/s"
        missed = "no tested rate reliably misses it" if high is None else f"reliably missed from {high:.1f}/s"
        return f"{words}; {held}, {missed}. Measure longer (--duration), or change the limit (--slo)"

    def shape(self) -> str:
        """How the p99 grows with the rate, in one sentence."""
        curve = [(rate, statistics.median(point.p99_ms for point in self.at(rate))) for rate in self.rates]
        curve = [(rate, p99) for rate, p99 in curve if math.isfinite(p99)]
        if not curve:
            return "nothing was answered"
        first = curve[0][1]
        knee = next((rate for rate, p99 in curve if p99 > 2 * first), None)
        start = f"p99 is {first:.2f} ms at {curve[0][0]:.1f}/s"
        if knee is None:
            return f"{start}, and less than twice that up to {curve[-1][0]:.1f}/s: the curve is flat"
        return f"{start}, and more than twice that from {knee:.1f}/s"

    def lines(self) -> list[str | Table]:
        """The terminal output."""
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
        """The row of a rate; the length of its bar is the logarithm of its p99."""
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
        """The result as plain JSON values."""
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
            # JSON has no NaN or infinity; a run without answers has no percentiles.
            "points": [
                {
                    name: None if isinstance(value, float) and not math.isfinite(value) else value
                    for name, value in dataclasses.asdict(point).items()
                }
                for point in self.points
            ],
        }
