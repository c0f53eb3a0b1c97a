"""Holding a process still."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.waiting import wait_for


def stop(pid: int) -> None:
    """Stops a process, and returns when each of its threads stands: one on its way still answers what it is sent.

    `SIGCONT` lets it go on.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: _states(pid) == {"T"}, "every thread to stop")


def _states(pid: int) -> set[str]:
    """The states of a process's threads: R, S, T ..."""
    return {stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")}
