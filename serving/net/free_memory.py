"""What large requests have left free in the allocator, given back to the system."""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

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
