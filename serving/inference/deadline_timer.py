"""Many deadlines on one timer of the event loop.

Setting and cancelling a timer costs tens of microseconds per request, and nearly every deadline is cancelled. So one
timer is armed for the earliest deadline. A cancelled deadline stays in the heap until it is due or the heap has
doubled.
"""

from __future__ import annotations

import asyncio
import heapq
from itertools import count
from typing import TYPE_CHECKING

from bertserve.serving.unawaited import run_guarded

if TYPE_CHECKING:
    from collections.abc import Callable


_SWEPT_AT = 1024


class Deadline:
    """A callback that runs at its time unless it is cancelled."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class DeadlineTimer:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []
        self._serial = count()
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = float("inf")
        self._swept_at = _SWEPT_AT

    def at(self, when: float, callback: Callable[[], None]) -> Deadline:
        """Calls `callback` at a time of the event loop's clock, in seconds."""
        deadline = Deadline(callback)
        heapq.heappush(self._heap, (when, next(self._serial), deadline))
        if len(self._heap) > self._swept_at:
            self._sweep()
        if when < self._armed_for:
            self._arm(when)
        return deadline

    def _sweep(self) -> None:
        """Removes cancelled deadlines.

        The next sweep is due when the heap has doubled, so the amortized cost of a deadline is constant.
        """
        self._heap = [entry for entry in self._heap if entry[2].callback is not None]
        heapq.heapify(self._heap)
        self._swept_at = max(_SWEPT_AT, 2 * len(self._heap))

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for = when
        self._timer = asyncio.get_running_loop().call_at(when, self._call_due)

    def _call_due(self) -> None:
        self._timer = None
        self._armed_for = float("inf")
        now = asyncio.get_running_loop().time()
        due = []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].callback is None):
            due.append(heapq.heappop(self._heap)[2])
        # The timer is armed before callbacks run: a callback that raises must not lose the other deadlines.
        if self._heap:
            self._arm(self._heap[0][0])
        for deadline in due:
            callback, deadline.callback = deadline.callback, None
            if callback is not None:
                run_guarded(_nothing, callback)


def _nothing() -> None:
    """The deadline has already passed."""
