"""Idle priority for an engine process that warms up beside the one that serves.

SCHED_IDLE and nice values cannot be undone without a privilege, and do not apply to a GPU. So the server stops the
process (SIGSTOP) while the engine that serves works, and continues it (SIGCONT) while that is idle. Both signals reach
all threads within about ten microseconds. The process always gets a tenth of the time, so that it warms up beside a
busy server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Self

from bertserve.serving.unawaited import run_guarded

if TYPE_CHECKING:
    from bertserve.serving.inference.dispatcher import Dispatcher
    from bertserve.serving.scheduling.batcher import Assignment

PERIOD_S = 0.1
MIN_RUN_S = 0.01
"""Minimum run time in each period."""


class IdlePriority:
    """Pauses a process while a dispatcher's engine works, within its `with` block.

    Attributes:
        paused_s: Total time for which the process was stopped.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._pid: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._runs = True
        self._has_turn = False
        self._since = 0.0
        self._ran_s = 0.0
        self.paused_s = 0.0

    def __enter__(self) -> Self:
        self._dispatcher.observers.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._dispatcher.observers.remove(self)
        if self._timer is not None:
            self._timer.cancel()
        self._set(runs=True)
        self._pid = None

    def follow(self, pid: int) -> None:
        """Pauses this process from now on. It has just been started."""
        self._pid = pid
        self._since = time.perf_counter()
        self._ran_s = 0.0
        self._update()
        self._wait(PERIOD_S)

    def batch_started(self, assignment: Assignment) -> None:  # noqa: ARG002  as of every observer
        self._update()

    def batch_ended(self, assignment: Assignment, occupied_us: float) -> None:  # noqa: ARG002
        self._update()

    def _update(self) -> None:
        self._set(runs=self._has_turn or not self._dispatcher.computing)

    def _set(self, *, runs: bool) -> None:
        if runs is self._runs or self._pid is None:
            return
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        if self._runs:
            self._ran_s += passed
        else:
            self.paused_s += passed
        self._runs = runs
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGCONT if runs else signal.SIGSTOP)

    def _end_period(self) -> None:
        """Gives the process a turn if it ran too little in the period. The next period begins after the turn."""
        ran_s = self._ran_s + (time.perf_counter() - self._since if self._runs else 0.0)
        self._has_turn = not self._has_turn and ran_s < MIN_RUN_S
        self._update()
        self._ran_s, self._since = 0.0, time.perf_counter()
        self._wait(MIN_RUN_S if self._has_turn else PERIOD_S)

    def _wait(self, seconds: float) -> None:
        """Schedules the end of a period or turn. If that fails, the process runs on without pauses."""
        runs_on = partial(self._set, runs=True)
        self._timer = asyncio.get_running_loop().call_later(seconds, run_guarded, runs_on, self._end_period)
