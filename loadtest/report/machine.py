"""Describes the machine on which figures were measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from serving.host import available_cpus

_PACKAGES = ("bertserve", "onnxruntime", "onnxruntime-gpu", "grpcio", "httptools", "tokenizers", "numpy")


def facts() -> dict[str, str]:
    """The facts about the machine that are needed to judge its figures."""
    facts = {
        "CPU": cpu_model(),
        "cores": f"{available_cpus()} usable of {os.cpu_count()}",
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


def cpu_model() -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
