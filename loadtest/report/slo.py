"""Service level objectives such as `p99=2ms,errors=0.1%`, and whether a run met them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertserve.loadtest.errors import BenchError

if TYPE_CHECKING:
    from bertserve.loadtest.report.result import Result

_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d{1,4})?)")
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")
_ALL = 100.0


@dataclass(slots=True, frozen=True)
class Objective:
    """One limit.

    Attributes:
        what: Name on the command line: `p99`, `max` or `errors`.
        percent: The percentile; 100 for `max`, unused for `errors`.
        limit: In ms, or in percent for `errors`.
    """

    what: str
    percent: float
    limit: float

    @property
    def is_latency(self) -> bool:
        """Whether it limits a latency."""
        return self.what != "errors"

    def __str__(self) -> str:
        return f"{self.what} <= {self.limit:g}{' ms' if self.is_latency else '%'}"


@dataclass(slots=True, frozen=True)
class Verdict:
    """The verdict on an objective.

    Attributes:
        objective: The objective, as text.
        found: The measured value, as text.
        held: Whether the objective was met.
    """

    objective: str
    found: str
    held: bool


def parse_slo(text: str) -> tuple[Objective, ...]:
    """Parses objectives such as `p99=2ms,errors=0.1%`.

    Raises:
        BenchError: An objective is invalid; the message is one line.
    """
    found = tuple(_objective(word.strip()) for word in text.split(",") if word.strip())
    if not found:
        raise BenchError("--slo has no objective; example: p99=2ms,errors=0.1%")
    names = [objective.what for objective in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BenchError(f"--slo: {twice[0]} is given twice")
    return found


def _objective(word: str) -> Objective:
    what, _, limit = (part.strip() for part in word.partition("="))
    if what == "errors":
        share = _SHARE.fullmatch(limit)
        if not share or float(share[1]) > _ALL:
            raise BenchError(f"--slo: {word!r}: the limit must be in percent, such as errors=0.1%")
        return Objective(what, _ALL, float(share[1]))
    percentile, time = _PERCENTILE.fullmatch(what), _TIME.fullmatch(limit)
    if (not percentile and what != "max") or (percentile and not float(percentile[1])):
        raise BenchError(f"--slo: unknown objective {what!r}; use a percentile such as p50 or p99.9, max or errors")
    if not time or not float(time[1]):
        raise BenchError(f"--slo: {word!r}: the limit must be in us, ms or s, such as p99=2ms")
    return Objective(what, float(percentile[1]) if percentile else _ALL, float(time[1]) * _UNITS_MS[time[2]])


def good_limit_ms(objectives: tuple[Objective, ...]) -> float | None:
    """The latency limit of goodput: the highest latency objective; None without one."""
    return max((objective.limit for objective in objectives if objective.is_latency), default=None)


def judge(objectives: tuple[Objective, ...], result: Result) -> list[Verdict]:
    """Whether a run met the objectives.

    If no objective limits errors, a failed request counts as infinitely late. Otherwise a server could keep its latency
    low by rejecting everything. A request that was never sent always counts as infinitely late, and never as an error.
    """
    alone = all(objective.is_latency for objective in objectives)
    return [_verdict(objective, result, failed_are_late=alone) for objective in objectives]


def _verdict(objective: Objective, result: Result, *, failed_are_late: bool) -> Verdict:
    if not objective.is_latency:
        share = result.failed_percent
        words = f"{share:.3g}% ({result.failed} of {result.offered - result.unsent})"
        return Verdict(str(objective), words, share <= objective.limit)
    answered = len(result.latency)
    if not answered:
        return Verdict(str(objective), "nothing was answered", held=False)
    # A request that was never sent is not a server error, but its user waited in vain.
    lost = result.unsent + (result.failed if failed_are_late else 0)
    # Converts the percentile over all of these requests to a percentile of the answered ones.
    percent = objective.percent * (answered + lost) / answered
    if percent > _ALL and lost:
        what = "failed or were never sent" if result.unsent else "failed"
        return Verdict(str(objective), f"{_ALL * lost / result.offered:.3g}% {what}", held=False)
    found = result.latency.percentile_ms(min(_ALL, percent)) if percent < _ALL else result.latency.max_ms()
    return Verdict(str(objective), f"{found:.3f} ms", found <= objective.limit)
