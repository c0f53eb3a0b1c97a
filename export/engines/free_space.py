"""Whether memory and disk suffice for a step that would otherwise be killed, or fail, in the middle."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from export.errors import NoRoomError

_GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def check(step: str, *, memory_bytes: int, folder: Path, disk_bytes: int) -> None:
    """Looks before the step starts.

    Args:
        step: What needs the room, to begin the sentence with.
        memory_bytes: The memory that it will need.
        folder: Where it will write.
        disk_bytes: How much it will write.

    Raises:
        NoRoomError: There is less.
    """
    memory, disk = available_memory(), shutil.disk_usage(folder).free
    if memory < memory_bytes:
        raise NoRoomError(
            f"{step} needs about {memory_bytes / _GIB:.1f} GiB of memory and {memory / _GIB:.1f} GiB are free; "
            "end other programs, or give the container more"
        )
    if disk < disk_bytes:
        raise NoRoomError(
            f"{step} needs about {disk_bytes / _GIB:.2f} GiB in {folder} and {disk / _GIB:.2f} GiB are free; "
            "make room there, or write elsewhere"
        )


def available_memory(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Bytes that can still be taken: the machine's, capped by the container's limit (cgroup v2).

    File pages that the kernel would give up count as free, in the container as on the machine.
    """
    host = int(_number(r"MemAvailable:\s+(\d+) kB", meminfo) or 0) * 1024
    limit = _number(r"^(\d+)$", cgroup / "memory.max")
    if limit is None:
        return host
    used = _number(r"^(\d+)$", cgroup / "memory.current") or 0
    cached = _number(r"^inactive_file (\d+)$", cgroup / "memory.stat") or 0
    return max(0, min(host, limit - used + cached))


def _number(pattern: str, file: Path) -> int | None:
    try:
        match = re.search(pattern, file.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None
