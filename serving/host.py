"""How many CPUs this process may really use: its affinity and its container's quota, not the host's count."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")

_NO_LIMIT = 1 << 60
"""How version 1 writes that there is none: a number beyond any machine."""


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """CPUs to run threads on: the affinity mask's size, capped by the cgroup quota (v2 or v1).

    A quota of 1.5 CPUs counts as 1: a second thread would spend half of each period throttled. At least 1.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(cgroup)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """CPUs that the container's quota allows, v2 or v1; None for no quota."""
    return _quota_v2(cgroup / "cpu.max") or _quota_v1(cgroup / "cpu")


def memory_limit(cgroup: Path = _CGROUP) -> int | None:
    """Bytes of memory that the container may have, v2 or v1; None for no limit."""
    found = _read(cgroup / "memory.max").strip() or _read(cgroup / "memory" / "memory.limit_in_bytes").strip()
    return int(found) if found.isdigit() and int(found) < _NO_LIMIT else None


def _quota_v2(file: Path) -> float | None:
    words = _read(file).split()
    if len(words) != 2 or words[0] == "max":  # noqa: PLR2004  "<quota|max> <period>"
        return None
    return int(words[0]) / int(words[1])


def _quota_v1(directory: Path) -> float | None:
    quota, period = _read(directory / "cpu.cfs_quota_us").strip(), _read(directory / "cpu.cfs_period_us").strip()
    if not quota or not period or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return ""
