"""A budget of bytes for what connections hold: bodies on their way, inflated bodies, replies that nobody reads."""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.settings import Settings

FREE_BYTES = 16_384
"""What is no larger needs no place in the budget: small requests cost nothing, and work while it is spent."""


class BufferBudget:
    """The bytes that all connections together may hold.

    Attributes:
        used: Bytes held now.
        refusals: How often there was no room.
    """

    __slots__ = ("limit_bytes", "refusals", "share_bytes", "used")

    def __init__(self, limit_bytes: int, share_bytes: int) -> None:
        """`share_bytes` is what one connection may hold of `limit_bytes`."""
        self.limit_bytes = limit_bytes
        self.share_bytes = min(share_bytes, limit_bytes)
        self.used = 0
        self.refusals = 0

    @classmethod
    def of(cls, settings: Settings) -> BufferBudget:
        """The budget that the settings name, half of which one connection may hold."""
        return cls(settings.buffer_limit_bytes, settings.buffer_limit_bytes // 2)

    def share(self, free_bytes: int = 0) -> BufferShare:
        """A connection's; its first `free_bytes` need no place in the budget."""
        return BufferShare(self, free_bytes)


class BufferShare:
    """What one connection holds of the budget.

    Attributes:
        held: Bytes, those included that need no place.
    """

    __slots__ = ("_budget", "_free_bytes", "held")

    def __init__(self, budget: BufferBudget, free_bytes: int) -> None:
        self._budget = budget
        self._free_bytes = free_bytes
        self.held = 0

    def take(self, size: int) -> bool:
        """Holds so many bytes more; False, and as many as before, where that is beyond the budget or the share."""
        budget, held = self._budget, self.held + size
        more = self._counted(held) - self._counted(self.held)
        if more and (budget.used + more > budget.limit_bytes or held > budget.share_bytes):
            budget.refusals += 1
            return False
        self._hold(held)
        return True

    def take_made(self, size: int) -> bool:
        """Holds so many bytes more that are there already, however many, unless the budget is spent."""
        budget = self._budget
        if budget.used >= budget.limit_bytes:
            budget.refusals += 1
            return False
        self._hold(self.held + size)
        return True

    def give(self, size: int) -> None:
        """Gives back so many of the bytes held."""
        self._hold(max(0, self.held - size))

    def _hold(self, held: int) -> None:
        self._budget.used += self._counted(held) - self._counted(self.held)
        self.held = held

    def _counted(self, held: int) -> int:
        return max(0, held - self._free_bytes)

    def close(self) -> None:
        self.give(self.held)


_MIN_WAIT_S, _MAX_WAIT_S = 2.0, 30.0
_GROWN_BYTES = 16 << 20
_WORTH_BYTES = 4 << 20
_LARGE_BYTES = 1 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_STATM = Path("/proc/self/statm")


async def give_back_free_memory() -> None:
    """Runs for ever: trims the heap while 16 MiB more are resident than there once were.

    glibc keeps up to 8 MiB free at the end of the heap of each thread that had a large body, where `malloc_trim` does
    not reach: what is larger than a MiB is mapped and unmapped by itself from now on. What is free below something in
    use stays resident, too, 70 MB after 64 half-sent bodies; `malloc_trim` gives that back. It takes a millisecond, and
    20 to 80 where there are 100 MB to give back, in a thread; where it finds little, it is called less and less often.
    Other C libraries have no such functions, and this returns.
    """
    libc = ctypes.CDLL(None)
    trim = getattr(libc, "malloc_trim", None)
    if trim is None:
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)
    least, wait_s = _resident_bytes(), _MIN_WAIT_S
    while True:
        await asyncio.sleep(wait_s)
        resident = _resident_bytes()
        least = min(least, resident)
        is_worth = True
        if resident > least + _GROWN_BYTES:
            await asyncio.to_thread(trim, 0)
            is_worth = resident - _resident_bytes() > _WORTH_BYTES
        wait_s = _MIN_WAIT_S if is_worth else min(2 * wait_s, _MAX_WAIT_S)


def _resident_bytes() -> int:
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
