"""Facts about this machine: usable CPUs, processor, GPU, and versions of installed libraries.

In containers, affinity and quota count, not the CPUs of the machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from bertserve.serving import cgroups

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


def available_cpus(proc: Path = cgroups.PROC) -> int:
    """Number of threads to run: the size of the affinity mask, capped by the quota of control groups.

    A quota of 1.5 CPUs counts as 1: a second thread would be throttled for half of each period. At least 1.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = cgroups.cpu_quota(proc)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def resident_bytes(process: int | None = None) -> int:
    """Resident memory of a process, by default of this one; 0 if it has ended."""
    try:
        pages = Path(f"/proc/{process or 'self'}/statm").read_bytes().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def can_busy_wait(proc: Path = cgroups.PROC) -> bool:
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


def installed(*distributions: str) -> dict[str, str]:
    """The first of some distributions that is installed, with its version; empty if none is."""
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return {name: importlib.metadata.version(name)}
    return {}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _value(key: str, file: Path) -> str:
    match = re.search(rf"^(?:{key})\s*:\s*(.+)$", _read(file), re.MULTILINE)
    return match[1].strip() if match else ""
