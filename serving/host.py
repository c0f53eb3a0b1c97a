"""Facts about this machine: usable CPUs and memory, processor, GPU, and versions of installed libraries.

In containers, affinity and the limits of control groups count, not the CPUs of the machine. Each limit of the own group
and of all around it counts, for v1 and v2: systemd's `CPUQuota=` and nested containers set limits below the root of
what is mounted here.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import sys
from contextlib import suppress
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

_BUSY_WAITS, _BUSY_WAIT_MACHINE = 2, 4

_CPUINFO = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")

_KERNELS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm", "sve", "bf16")
"""Instruction sets by which libraries choose their matrix kernels, and so the last bits of an answer."""

_BY_FLOATS = {"avx512_bf16", "bf16"}
"""Those of them that do not multiply 8-bit integers."""

_EXACT_SUMS = {"avx512_vnni", "avx_vnni"}
"""x86 instructions that add 8-bit products in 32 bits."""

_X86 = {"x86_64", "amd64", "i686"}


@dataclass(frozen=True)
class _Memory:
    """Names of files and fields in each version."""

    limit: str
    used: str
    file_pages: str
    events: str


_V1 = _Memory("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
_V2 = _Memory("memory.max", "memory.current", "inactive_file", "memory.events")


def command(rest: str) -> str:
    """A command of bertserve to type next, in the way this process was started: `.venv/bin/bertserve serve`.

    >>> command("serve --models models")
    'bertserve serve --models models'
    """
    called = Path(sys.argv[0])
    typed = called.name != "bertserve" or shutil.which("bertserve") == str(called)  # else the shell would not find it
    return f"{'bertserve' if typed else shlex.quote(_from_here(called))} {rest}"


def installing(extras: str, module: Path = Path(__file__)) -> str:
    """The command that installs an extra of bertserve: from a checkout its own files, otherwise the package.

    In a virtual environment that is not activated, `pip` alone would be another one's.
    """
    root, here = module.parents[3], Path.cwd()
    pip = "pip" if sys.prefix == sys.base_prefix else shlex.quote(_from_here(Path(sys.prefix, "bin", "pip")))
    if not (root / "pyproject.toml").exists():
        return f"{pip} install 'bertserve[{extras}]'"
    constraints, checkout = shlex.quote(_from_here(root / "constraints.txt")), "." if root == here else root
    return f"{pip} install --constraint {constraints} --editable '{checkout}[{extras}]'"


def _from_here(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if here in path.parents else path)


def available_cpus(proc: Path = PROC) -> int:
    """Number of threads to run: the size of the affinity mask, capped by the quota of control groups.

    A quota of 1.5 CPUs counts as 1: a second thread would be throttled for half of each period. At least 1.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(proc)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def resident_bytes(process: int | None = None) -> int:
    """Resident memory of a process, by default of this one; 0 if it has ended."""
    try:
        pages = Path(f"/proc/{process or 'self'}/statm").read_bytes().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def can_busy_wait(proc: Path = PROC) -> bool:
    """Whether the server and its engine may wait for each other without sleeping: each takes a CPU meanwhile.

    Other processes need CPUs, too: on a machine with two, a lone request took up to twice as long.
    """
    return len(os.sched_getaffinity(0)) >= _BUSY_WAIT_MACHINE and available_cpus(proc) >= _BUSY_WAITS


def processor(cpuinfo: Path = _CPUINFO) -> str:
    return _value("model name", cpuinfo) or os.uname().machine


def instructions(cpuinfo: Path = _CPUINFO) -> list[str]:
    flags = _value("flags|Features", cpuinfo).split()
    return [name for name in _KERNELS if name in flags]


def integer_kernels(cpuinfo: Path = _CPUINFO, machine: str = os.uname().machine) -> tuple[str, ...]:
    """The architecture and instruction sets by which libraries choose their kernels for 8-bit products."""
    return (machine, *(name for name in instructions(cpuinfo) if name not in _BY_FLOATS))


def saturates(cpuinfo: Path = _CPUINFO, machine: str = os.uname().machine) -> bool:
    """Whether the default instructions for 8-bit products may saturate here: x86 without VNNI.

    They add two products of u8 and s8 in 16 bits (`vpmaddubsw`). Arm's instructions do not saturate.
    """
    return machine.lower() in _X86 and _EXACT_SUMS.isdisjoint(instructions(cpuinfo))


def cpu(cpuinfo: Path = _CPUINFO) -> str:
    """The processor with what decides its arithmetic: clouds give one name to many generations.

    >>> cpu(Path("/nowhere")) == os.uname().machine
    True
    """
    kernels = ", ".join(instructions(cpuinfo))
    return f"{processor(cpuinfo)} ({kernels})" if kernels else processor(cpuinfo)


def gpu(folder: Path = _GPUS) -> str:
    """The name of the first GPU from its driver's files, without starting it; empty if there is none."""
    names = [_value("Model", file) for file in sorted(folder.glob("*/information"))]
    return next(filter(None, names), "")


def installed_versions(*distributions: str) -> dict[str, str]:
    """The first of some distributions that is installed, with its version; empty if none is."""
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return {name: importlib.metadata.version(name)}
    return {}


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


def _read(file: Path, errors: str = "surrogateescape") -> str:
    try:
        return file.read_text(encoding="utf-8", errors=errors).strip()
    except OSError:
        return ""


def _value(key: str, file: Path) -> str:
    match = re.search(rf"^(?:{key})\s*:\s*(.+)$", _read(file, "replace"), re.MULTILINE)
    return match[1].strip() if match else ""
