"""Turns of the event loop for work that may wait: what connections have sent beyond their first piece."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_TURN_S = 0.0003
"""What all connections of a port may do of such work in one turn of the loop. A request passes five turns or so."""


class FairQueue:
    """The work of one port that waits for the next turn of the loop, first come, first served.

    Each turn does as much of it as takes 0.3 ms, and at least one piece, so that other work of the loop is
    held up by no more than that, however many connections send more than they should.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], float]] = deque()
        self._is_due = False

    def add(self, work: Callable[[], float]) -> None:
        """Does a piece of work in its turn; it returns how many seconds of work it has begun for later turns."""
        self._waiting.append(work)
        self._wake()

    async def wait(self, more_s: float) -> None:
        """Waits for a turn, in which the caller does work of so many seconds."""
        turn = asyncio.Event()

        def begin() -> float:
            turn.set()
            return more_s

        self.add(begin)
        await turn.wait()

    def _wake(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        waiting, clock = self._waiting, self._clock
        self._is_due = False
        end = clock() + _TURN_S
        # What is added meanwhile is for the next turn.
        for _ in range(len(waiting)):
            work = waiting.popleft()
            try:
                end -= work()
            finally:
                if waiting:
                    self._wake()
            if clock() >= end:
                return
