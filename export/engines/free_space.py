"""Checks memory and disk before a step that would otherwise be killed or fail halfway."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from bertserve.export.errors import NoRoomError
from bertserve.serving import host

_GIB = 1 << 30
_MEMINFO = Path("/proc/meminfo")


def check(step: str, *, memory_bytes: int, folder: Path, disk_bytes: int) -> None:
    """Checks before the step starts.

    Raises:
        NoRoomError: There is less.
    """
    memory, disk = available_memory(), shutil.disk_usage(folder).free
    if memory < memory_bytes:
        raise NoRoomError(
            f"{step} needs about {memory_bytes / _GIB:.1f} GiB of memory, but {memory / _GIB:.1f} GiB are free; "
            "stop other programs, or give the container more memory"
        )
    if disk < disk_bytes:
        raise NoRoomError(
            f"{step} needs about {disk_bytes / _GIB:.2f} GiB in {folder}, but {disk / _GIB:.2f} GiB are free; "
            "free disk space, or write elsewhere"
        )


def available_memory(proc: Path = host.PROC, meminfo: Path = _MEMINFO) -> int:
    """Available memory in bytes: the machine's, within the limits of control groups."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="ascii"))
    except OSError:
        found = None
    free, left = int(found[1]) * 1024 if found else 0, host.memory_left(proc)
    return free if left is None else min(free, left)
