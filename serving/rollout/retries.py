"""When a version that could not be loaded is tried again, where the reason passes: pauses that grow, and an end."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

TRIES = 8
"""After so many a version is left alone: whatever it is, it does not pass."""

_LONGEST_S = 600.0

Key = tuple[str, int]
"""A model and the number of a version."""


class _Next(NamedTuple):
    tries: int
    due: float


class Retries:
    """The versions that wait for their next try; each pause is twice as long as the one before."""

    def __init__(self, first_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts with none.

        Args:
            first_s: The first pause.
            clock: Seconds.
        """
        self._first_s = first_s
        self._clock = clock
        self._next: dict[Key, _Next] = {}

    def failed(self, key: Key) -> float | None:
        """Notes a failure; returns the seconds until the next try, None where that was the last one."""
        tries = 1 + (self._next[key].tries if key in self._next else 0)
        if tries >= TRIES:
            self.forget(key)
            return None
        pause_s = min(math.ldexp(self._first_s, tries - 1), max(self._first_s, _LONGEST_S))
        self._next[key] = _Next(tries, self._clock() + pause_s)
        return pause_s

    def waits(self, key: Key) -> bool:
        """Whether the next try of a version is still to come."""
        following = self._next.get(key)  # at once: a thread asks, and the event loop forgets
        return following is not None and self._clock() < following.due

    def when(self, key: Key) -> str:
        """What comes next, for whoever asks."""
        if key not in self._next:
            return "not tried again by itself"
        tries, due = self._next[key]
        return f"tried again in {max(0, math.ceil(due - self._clock()))} s (try {tries + 1} of {TRIES})"

    def forget(self, key: Key) -> None:
        """It serves, or is not there any more."""
        self._next.pop(key, None)
