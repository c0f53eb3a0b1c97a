"""Versions that are not served: why, and when one that failed for a temporary reason is tried again."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

TRIES = 8
"""Maximum tries of a version."""

_LONGEST_S = 600.0

Key = tuple[str, int]
"""Model and version."""


class _Retry(NamedTuple):
    tries: int
    due: float


class UnservedVersions:
    """Why versions of a repository are not served.

    Args:
        first_pause_s: Pause before the second try, doubled for each further one; 0 disables retries.
        clock: Returns seconds.
    """

    def __init__(
        self, root: Path, cache: Path | None, first_pause_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root = root
        self._private = [f"{path}/" for path in (root, cache) if path]
        self._first_pause_s = first_pause_s
        self._clock = clock
        self._left_out: dict[Key, str] = {}
        self._failed: dict[Key, str] = {}
        self._incomplete: dict[Key, str] = {}
        self._retries: dict[Key, _Retry] = {}

    def public(self, words: str) -> str:
        """Removes this machine's paths from a message for clients."""
        for path in self._private:
            words = words.replace(path, "")
        return words

    def leave_out(self, key: Key, reason: str) -> None:
        self.forget(key)
        self._left_out[key] = reason

    def is_left_out(self, key: Key) -> bool:
        """Whether a version was refused, or passed over because an older one was requested."""
        return key in self._left_out

    def fail(self, key: Key, reason: str, *, served: int) -> float | None:
        """Records a temporary failure. Only versions newer than `served` are tried again.

        Returns:
            Seconds until the next try: 0 if there is none, None if this try was the last.
        """
        pause_s = 0.0
        if self._first_pause_s and key[1] > served:
            tries = 1 + (self._retries[key].tries if key in self._retries else 0)
            if tries >= TRIES:
                return None
            pause_s = min(math.ldexp(self._first_pause_s, tries - 1), max(self._first_pause_s, _LONGEST_S))
            self._retries[key] = _Retry(tries, self._clock() + pause_s)
        self._left_out.pop(key, None)
        self._failed[key] = reason
        return pause_s

    def waits(self, key: Key) -> bool:
        retry = self._retries.get(key)  # one read: a thread asks while the event loop may forget the key
        return retry is not None and self._clock() < retry.due

    def when(self, key: Key, *, served: int) -> str:
        """When a failed version is tried again, as text."""
        if key not in self._retries or key[1] <= served:
            return "no automatic retry"
        tries, due = self._retries[key]
        return f"retrying in {max(0, math.ceil(due - self._clock()))} s (attempt {tries + 1} of {TRIES})"

    def incomplete(self, key: Key, missing: str | None) -> None:
        """Records what a version that is being copied lacks; None if it is complete."""
        if missing is None:
            self._incomplete.pop(key, None)
        else:
            self._incomplete[key] = self.public(missing)

    def forget(self, key: Key) -> None:
        for reasons in (self._left_out, self._failed, self._retries):
            reasons.pop(key, None)

    def reasons(self, served: Mapping[str, int]) -> dict[Key, str]:
        """Why each version is not served. Versions whose directory is gone are forgotten."""
        for key in {*self._left_out, *self._failed, *self._incomplete.copy()}:  # a thread changes the last one
            if _is_gone(self._root / key[0] / str(key[1])):
                self._incomplete.pop(key, None)
                self.forget(key)
        return (
            {key: f"incomplete: {missing}" for key, missing in self._incomplete.copy().items()}
            | {key: f"{reason}; {self.when(key, served=served[key[0]])}" for key, reason in self._failed.items()}
            | self._left_out
        )


def _is_gone(path: Path) -> bool:
    try:
        path.lstat()
    except OSError as error:  # a failing volume proves nothing
        return isinstance(error, FileNotFoundError)
    return False
