"""Reads LoadGen's summary of a performance run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.errors import BenchError

if TYPE_CHECKING:
    from pathlib import Path

_LINE = re.compile(r"^(?P<name>[^:\n]+?)\s*: *(?P<value>.+)$", re.MULTILINE)
_ESTIMATE = re.compile(r"Early stopping \S+ percentile estimate: (\d+)")
_ERRORS = re.compile(r"^(\d+) ERRORS? encountered", re.MULTILINE)
_NS_PER_MS = 1e6

METRICS = {
    "SingleStream": "90th percentile, ms",
    "MultiStream": "99th percentile, ms",
    "Server": "scheduled samples a second",
    "Offline": "samples a second",
}
"""The metric of each scenario by the rules; for the streams, the early-stopping estimate."""

_RATES = {"Server": "Scheduled samples per second", "Offline": "Samples per second"}


@dataclass(slots=True, frozen=True)
class Verdict:
    """The result of a performance run.

    Attributes:
        scenario: LoadGen's name of it.
        valid: LoadGen's own verdict.
        metric: The scenario's metric, see `METRICS`; NaN if LoadGen reports none.
        p50_ms: Median latency. Offline is one query, so there it is the time of all samples.
        p99_ms: 99th percentile.
        errors: Number of errors that LoadGen logged; the rules allow none.
        reasons: Conditions that the run does not satisfy.
    """

    scenario: str
    valid: bool
    metric: float
    p50_ms: float
    p99_ms: float
    errors: int
    reasons: tuple[str, ...]

    def word(self) -> str:
        """LoadGen's verdict, with the conditions that are not satisfied."""
        return "VALID" if self.valid else f"INVALID ({', '.join(self.reasons)} not satisfied)"

    def text(self) -> str:
        """A one-line summary."""
        latency = "" if self.scenario == "Offline" else f", p50 {self.p50_ms:.2f} ms, p99 {self.p99_ms:.2f} ms"
        return f"{self.scenario}, performance: {self.word()}, {METRICS[self.scenario]} {self.metric:.2f}{latency}"


def read_verdict(file: Path) -> Verdict:
    """Parses `mlperf_log_summary.txt`.

    Raises:
        BenchError: The file or a line is missing.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"LoadGen left no summary: {file}: {error.strerror}") from error
    lines = {found["name"].strip(): found["value"].strip() for found in _LINE.finditer(text)}
    try:
        scenario = lines["Scenario"]
        p50_ms, p99_ms = (int(lines[f"{p}.00 percentile latency (ns)"]) / _NS_PER_MS for p in (50, 99))
        reasons = tuple(name.removesuffix(" satisfied").lower() for name, value in lines.items() if value == "NO")
        errors = _ERRORS.search(text)
        estimate = _ESTIMATE.search(text)
        if scenario in _RATES:
            metric = float(lines[_RATES[scenario]])
        else:
            metric = int(estimate[1]) / _NS_PER_MS if estimate else float("nan")
        valid = lines["Result is"] == "VALID"
    except KeyError as error:
        raise BenchError(f"LoadGen's summary has no line {error}:\n{text}") from error
    return Verdict(scenario, valid, metric, p50_ms, p99_ms, int(errors[1]) if errors else 0, reasons)
