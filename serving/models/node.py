"""The node at hand: on what it makes depends, and with what it must be compared before it is used again."""

from __future__ import annotations

import importlib.metadata
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from serving.models.manifest import GPUS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.models.manifest import Target

_CPUINFO = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")

_DISTRIBUTIONS: Mapping[Target, tuple[str, ...]] = {
    "cpu": ("onnxruntime", "onnxruntime-gpu"),
    "cuda": ("onnxruntime-gpu", "onnxruntime"),
    "openvino": ("openvino",),
    **dict.fromkeys(GPUS, ("tensorrt-rtx-cu13", "tensorrt")),
}
"""Under which names the library comes that runs a target's artifacts."""

_KERNELS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm", "sve", "bf16")
"""Instructions that libraries choose their matrix kernels by, and so the last bits of an answer."""


def processor(file: Path = _CPUINFO) -> str:
    """What this machine's processor calls itself."""
    return _line(r"model name", file) or os.uname().machine


def gpu(folder: Path = _GPUS) -> str:
    """The first GPU, as its driver names it without being started; empty where there is none."""
    found = [_line("Model", file) for file in sorted(folder.glob("*/information"))]
    return next(filter(None, found), "")


def device_of(target: Target) -> str:
    """What runs a target's artifacts here: the GPU where it is for one and there is one, else the processor."""
    return (gpu() if target == "cuda" or target in GPUS else "") or device()


def device(file: Path = _CPUINFO) -> str:
    """The processor with what decides its arithmetic: clouds give one name to many generations.

    >>> device(Path("/nowhere")) == os.uname().machine
    True
    """
    kernels = ", ".join(instructions(file))
    return f"{processor(file)} ({kernels})" if kernels else processor(file)


def instructions(file: Path = _CPUINFO) -> list[str]:
    """What this processor has of the instructions that libraries choose their matrix kernels by."""
    known = _line(r"flags|Features", file).split()
    return [name for name in _KERNELS if name in known]


def libraries(target: Target) -> dict[str, str]:
    """Version by name of what runs a target's artifacts here; empty where nothing is installed that does."""
    for name in _DISTRIBUTIONS.get(target, ()):
        with suppress(importlib.metadata.PackageNotFoundError):
            return {name: importlib.metadata.version(name)}
    return {}


def _line(key: str, file: Path) -> str:
    try:
        content = file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    found = re.search(rf"^(?:{key})\s*:\s*(.+)$", content, re.MULTILINE)
    return found[1].strip() if found else ""
