"""Python on another processor: QEMU's user mode, as `make programs` unpacks it, with a `/proc/cpuinfo` to match."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.models import ROOT
from tests.support.skips import excused

if TYPE_CHECKING:
    from pathlib import Path

HASWELL = "fpu sse sse2 ssse3 sse4_1 sse4_2 avx f16c fma bmi1 bmi2 avx2"
"""Flags of QEMU's Haswell that libraries choose kernels by. QEMU emulates nothing of AVX-512."""

_FOLDER = ROOT / "build" / "qemu"
_QEMU = _FOLDER / "usr" / "bin" / "qemu-x86_64"
_LIMIT_S = 1800


def obstacle() -> str | None:
    """Why nothing can be emulated here; None where it can."""
    if platform.machine() != "x86_64":
        return excused("QEMU runs this machine's own programs, which are not for x86")
    return None if _QEMU.exists() else "no QEMU here (see make programs)"


def python_on_haswell(folder: Path, script: str, *arguments: str) -> str:
    """What a script prints on a processor with AVX2 and without VNNI."""
    (folder / "proc").mkdir(exist_ok=True)
    (folder / "proc" / "cpuinfo").write_text(f"model name\t: Haswell\nflags\t\t: {HASWELL}\n")
    # The interpreter itself: a virtual environment's link would be followed by the emulated one, which loses its place.
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    command = [str(_QEMU), "-cpu", "Haswell", "-L", str(folder), "-U", "LD_LIBRARY_PATH"]
    done = subprocess.run(
        [*command, os.path.realpath(sys.executable), "-c", script, *arguments],
        env={**os.environ, "LD_LIBRARY_PATH": str(_FOLDER / "usr/lib/x86_64-linux-gnu"), "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
