"""Where a run is: on a terminal in one line that changes, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from loadtest.report.result import Result


class Progress:
    """Shows progress on standard error; leaving its `with` block clears the line."""

    _every_s = 10.0

    def __init__(self, seconds: float = 0.0) -> None:
        """Shows runs of so many seconds, or the words that it is given."""
        self.seconds = seconds
        self.prefix = ""
        self._on_terminal = sys.stderr.isatty()
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Clears the line."""
        if self._on_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, result: Result, passed_s: float) -> None:
        """Shows what is known of a run after so many seconds."""
        latency = result.latency
        figures = f"p50 {latency.percentile_ms(50):.2f} p99 {latency.percentile_ms(99):.2f} ms" if len(latency) else ""
        self.say(
            f"{self.prefix}{passed_s:.0f} of {self.seconds:.0f} s: {result.offered} sent,"
            f" {len(latency)} answered, {result.failed} failed; {figures}"
        )

    def say(self, words: str) -> None:
        """Shows some words."""
        if self._on_terminal:
            print(f"\r\x1b[K{words}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            print(words, file=sys.stderr, flush=True)
