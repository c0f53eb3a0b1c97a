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


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; some of its threads may still be on their way."""
    return _state(Path(f"/proc/{pid}/stat")) == "T"


def _states(pid: int) -> set[str]:
    return {_state(stat) for stat in Path(f"/proc/{pid}/task").glob("*/stat")}


def _state(stat: Path) -> str:
    return stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
