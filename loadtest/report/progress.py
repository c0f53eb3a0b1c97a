"""Progress of a load test on standard error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bertserve.serving.bulk.progress import ProgressLine

if TYPE_CHECKING:
    from bertserve.loadtest.report.result import Result


class Progress(ProgressLine):
    """Shows the progress of runs of `seconds` seconds, or a given text."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(sys.stderr)
        self.seconds = seconds
        self.prefix = ""

    def show(self, result: Result, passed_s: float) -> None:
        """Shows the figures of a run after `passed_s` seconds."""
        latency = result.latency
        figures = f"p50 {latency.percentile_ms(50):.2f} p99 {latency.percentile_ms(99):.2f} ms" if len(latency) else ""
        self.say(
            f"{self.prefix}{passed_s:.0f} of {self.seconds:.0f} s: {result.offered} sent,"
            f" {len(latency)} answered, {result.failed} failed; {figures}",
            passed_s / self.seconds if self.seconds else None,
        )
