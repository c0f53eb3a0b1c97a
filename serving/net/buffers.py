"""The buffer budget of connections: request bodies, decompressed bodies, and replies that clients have not read."""

from __future__ import annotations

import asyncio
import ctypes
from typing import TYPE_CHECKING

from bertserve.serving.host import resident_bytes

if TYPE_CHECKING:
    from collections.abc import MutableSequence

    from bertserve.serving.settings import Settings

FREE_BYTES = 16_384
"""Bytes that need no budget. Small requests cost nothing, and work while the budget is spent."""


class BufferBudget:
    """The bytes that all connections together may hold, of one process or of several.

    Each process writes the bytes that it holds in a slot of its own. Without a lock, processes that reserve at the same
    moment may exceed the limit by one reservation each.

    Attributes:
        refusals: Number of reservations that were refused to this process.
    """

    __slots__ = ("_slot", "_slots", "limit_bytes", "refusals", "share_bytes")

    def __init__(
        self, limit_bytes: int, share_bytes: int, slots: MutableSequence[int] | memoryview | None = None, slot: int = 0
    ) -> None:
        """Limits one connection to `share_bytes` of `limit_bytes`; without `slots`, there are no other processes."""
        self.limit_bytes = limit_bytes
        self.share_bytes = min(share_bytes, limit_bytes)
        self.refusals = 0
        self._slots, self._slot = [0] if slots is None else slots, slot

    @classmethod
    def of(cls, settings: Settings, slots: memoryview | None = None, slot: int = 0) -> BufferBudget:
        """The budget of the settings. One connection may hold half of it."""
        return cls(settings.buffer_limit_bytes, settings.buffer_limit_bytes // 2, slots, slot)

    @property
    def used(self) -> int:
        """Bytes held now."""
        return sum(self._slots)

    def hold(self, more: int) -> None:
        """Adds to the bytes that this process holds; `more` may be negative."""
        self._slots[self._slot] += more

    def share(self, free_bytes: int = 0) -> BufferShare:
        """A connection's share; its first `free_bytes` do not count."""
        return BufferShare(self, free_bytes)


class BufferShare:
    """The bytes of the budget that one connection holds.

    Attributes:
        held: Bytes held, including those that do not count.
    """

    __slots__ = ("_budget", "_free_bytes", "held")

    def __init__(self, budget: BufferBudget, free_bytes: int) -> None:
        self._budget = budget
        self._free_bytes = free_bytes
        self.held = 0

    @property
    def is_exceeded(self) -> bool:
        """Whether a finished reply alone is more than a connection may hold."""
        return self.held > self._budget.share_bytes

    def take(self, size: int) -> bool:
        """Reserves `size` more bytes. Returns False, and reserves none, beyond the budget or the share."""
        budget, held = self._budget, self.held + size
        more = self._counted(held) - self._counted(self.held)
        if more and (budget.used + more > budget.limit_bytes or held > budget.share_bytes):
            budget.refusals += 1
            return False
        self._hold(held)
        return True

    def take_made(self, size: int) -> bool:
        """Counts `size` more bytes that exist already, however many. Returns False if the budget is spent."""
        budget = self._budget
        if budget.used >= budget.limit_bytes:
            budget.refusals += 1
            return False
        self._hold(self.held + size)
        return True

    def give(self, size: int) -> None:
        """Releases `size` bytes."""
        self._hold(max(0, self.held - size))

    def _hold(self, held: int) -> None:
        self._budget.hold(self._counted(held) - self._counted(self.held))
        self.held = held

    def _counted(self, held: int) -> int:
        return max(0, held - self._free_bytes)

    def close(self) -> None:
        self.give(self.held)


_MIN_WAIT_S, _MAX_WAIT_S = 2.0, 30.0
_GROWN_BYTES = 16 << 20
_WORTH_BYTES = 4 << 20


async def give_back_free_memory() -> None:
    """Runs forever: trims the heap while resident memory is more than 16 MiB above its minimum.

    Free memory below a used block stays resident: 50 MB of a server of 97 MB after large bodies and replies.
    `malloc_trim` returns it to the system. This takes a millisecond, or 20 to 80 ms for 100 MB, in a thread. If it
    finds little, the interval grows. Other C libraries lack it; this function then returns.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return
    least, wait_s = resident_bytes(), _MIN_WAIT_S
    while True:
        await asyncio.sleep(wait_s)
        resident = resident_bytes()
        least = min(least, resident)
        is_worth = True
        if resident > least + _GROWN_BYTES:
            await asyncio.to_thread(trim, 0)
            is_worth = resident - resident_bytes() > _WORTH_BYTES
        wait_s = _MIN_WAIT_S if is_worth else min(2 * wait_s, _MAX_WAIT_S)
