"""A server under attack, observed from outside."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.benchmarks.processes import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

_SCHEDULED = 2


@dataclass(slots=True, frozen=True)
class Victim:
    """A server with the fake engine.

    Attributes:
        pid: Its first process, which has the connections.
        ports: By wire.
        log_lines: Number of lines in its log.
    """

    pid: int
    ports: dict[str, int]
    log_lines: Callable[[], int]

    def cpu_s(self) -> float:
        """CPU time used so far, to the nanosecond (on Linux from the clock that `clock_getcpuclockid` names)."""
        return time.clock_gettime(~self.pid << 3 | _SCHEDULED)

    def memory_mb(self) -> float:
        return resident_bytes(self.pid) / 1e6

    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())
