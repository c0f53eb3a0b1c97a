"""A server under attack, observed from outside."""

from __future__ import annotations

import contextlib
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bertserve.loadtest.benchmarks.processes import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.server import Server

_SCHEDULED = 2
_SOFT_DESCRIPTORS = 1024


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


def victim_of(server: Server) -> Victim:
    ports = {wire: int(getattr(server, wire).rpartition(":")[2]) for wire in ("http", "grpc")}
    return Victim(server.pid, ports, lambda: server.log.count("\n"))


@contextlib.contextmanager
def few_descriptors() -> Iterator[None]:
    """Processes started in this block have the soft descriptor limit of a login."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_SOFT_DESCRIPTORS, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
