"""CPU time and memory of running processes, from Linux's `/proc`."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PARENT, _USER, _SYSTEM, _RESIDENT = 1, 11, 12, 21
"""Fields of `/proc/<pid>/stat` after the process's name, which may itself hold blanks and brackets."""


def descendants(pid: int) -> list[int]:
    """Children of a process, their children and so on, without the process itself."""
    parents = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[_PARENT])
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def cpu_s(pid: int) -> float:
    """CPU time of a process in seconds; 0 if it is gone."""
    fields = _stat(pid)
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_PER_S if fields else 0.0


def runs(pid: int, module: str) -> bool:
    """Whether a process was started as `python -m module`."""
    try:
        return module.encode() in (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; shared pages count in full. 0 if it is gone."""
    fields = _stat(pid)
    return int(fields[_RESIDENT]) * _PAGE_BYTES if fields else 0


def machine_cpu_s() -> float:
    """CPU time of all cores since the machine started, in seconds."""
    user, nice, system, _, _, irq, soft_irq = map(int, (_PROC / "stat").read_text().split()[1:8])
    return (user + nice + system + irq + soft_irq) / _TICKS_PER_S


def _stat(pid: int) -> list[str]:
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
