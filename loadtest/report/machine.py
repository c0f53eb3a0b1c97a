"""The machine that figures were measured on: figures without it say nothing."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("bertserve", "onnxruntime", "onnxruntime-gpu", "grpcio", "httptools", "tokenizers", "numpy")
_CGROUP = Path("/sys/fs/cgroup")


def facts() -> dict[str, str]:
    """What a reader must know to judge figures from here."""
    facts = {
        "CPU": cpu_model(),
        "cores": f"{usable_cores()} usable of {os.cpu_count()}",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.1f} GB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name for itself."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may really use: its affinity mask, capped by its container's quota; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota = _words(cgroup / "cpu.max") or [
        *_words(cgroup / "cpu" / "cpu.cfs_quota_us"),
        *_words(cgroup / "cpu" / "cpu.cfs_period_us"),
    ]
    match quota:
        case [limit, period] if limit.isdigit() and int(limit) > 0:
            return max(1, min(allowed, int(limit) // int(period)))
        case _:
            return allowed


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").split()
    except OSError:
        return []
