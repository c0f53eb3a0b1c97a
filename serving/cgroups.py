"""Limits of control groups on this process: each limit of its own group and of all around it, for v1 and v2.

systemd's `CPUQuota=` and nested containers set limits below the root of what is mounted here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROC = Path("/proc/self")

_MOUNT = re.compile(
    r"^\d+ \d+ \S+ (?P<root>\S+) (?P<at>\S+) .*? - cgroup(?P<v2>2?) \S+ (?P<controllers>\S+)$", re.MULTILINE
)
"""A line of `mountinfo`, proc(5): the group that is visible at a folder, and a v1 hierarchy's controllers."""

_NO_LIMIT = 1 << 60
"""Version 1 writes no limit as a number beyond any machine."""


@dataclass(frozen=True)
class _Memory:
    """Names of files and fields in each version."""

    limit: str
    used: str
    file_pages: str
    events: str


_V1 = _Memory("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
_V2 = _Memory("memory.max", "memory.current", "inactive_file", "memory.events")


def cpu_quota(proc: Path = PROC) -> float | None:
    """CPUs that the narrowest quota allows; None for no quota."""
    quotas = []
    for folder, is_v2 in _groups("cpu", proc):
        if is_v2:
            quota, _, period = _read(folder / "cpu.max").partition(" ")  # "<quota|max> <period>"
        else:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit(proc: Path = PROC) -> int | None:
    """The smallest memory limit in bytes; None for no limit."""
    return min((limit for _, _, limit in _limits(proc)), default=None)


def memory_left(proc: Path = PROC) -> int | None:
    """Bytes that are left before a limit is reached; None for no limit.

    File pages that the kernel can reclaim count as free.
    """
    left = []
    for folder, names, limit in _limits(proc):
        used = _read(folder / names.used)
        pages = re.search(rf"^{names.file_pages} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
        taken = int(used) if used.isdecimal() else 0
        left.append(max(0, limit - taken + (int(pages[1]) if pages else 0)))
    return min(left, default=None)


def oom_kills(proc: Path = PROC) -> int:
    """How many processes the kernel has killed because a limit was reached; a group's count includes those within."""
    events = [_read(folder / names.events) for folder, names, _ in _limits(proc)]
    return sum(int(count) for text in events for count in re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE))


def _limits(proc: Path) -> Iterator[tuple[Path, _Memory, int]]:
    for folder, is_v2 in _groups("memory", proc):
        names = _V2 if is_v2 else _V1
        limit = _read(folder / names.limit)
        if limit.isdecimal() and int(limit) < _NO_LIMIT:
            yield folder, names, int(limit)


def _groups(controller: str, proc: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of the groups that hold this process, as far up as they are mounted, and whether they are of v2."""
    paths: dict[str, str] = {}
    for line in _read(proc / "cgroup").splitlines():  # "<hierarchy>:<controllers>:<path>"
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)  # v2 names no controllers
    for mount in _MOUNT.finditer(_read(proc / "mountinfo")):
        is_v2 = bool(mount["v2"])
        of = "" if is_v2 else controller
        if of in paths and (is_v2 or controller in mount["controllers"].split(",")):
            for folder in _upwards(paths[of], _plain(mount["root"])):
                yield Path(_plain(mount["at"])) / folder, is_v2


def _upwards(path: str, root: str) -> Sequence[PurePosixPath]:
    """A group and those around it, below the mounted one; only the mounted one if the path to it is not visible.

    >>> [str(folder) for folder in _upwards("/pod/container/job", "/pod")]
    ['container/job', 'container', '.']
    >>> [str(folder) for folder in _upwards("/../elsewhere", "/")]
    ['.']
    """
    group, top = PurePosixPath(path), PurePosixPath(root)
    seen = group.is_relative_to(top) and ".." not in group.parts
    below = group.relative_to(top) if seen else PurePosixPath()
    return [below, *below.parents]


def _plain(escaped: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), escaped)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""
