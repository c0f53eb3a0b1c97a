"""Describes the machine on which figures were measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from bertserve.serving.host import available_cpus, processor

_PACKAGES = ("bertserve", "onnxruntime", "onnxruntime-gpu", "grpcio", "httptools", "tokenizers", "numpy")


def facts() -> dict[str, str]:
    """The facts about the machine that are needed to judge its figures."""
    facts = {
        "CPU": processor(),
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
