"""How a module of ours is run in a process of its own, and how that ends with this one.

Imports next to nothing: an engine process asks for its end before it does anything that takes time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Of `prctl`: which signal this process gets when its parent ends (linux/prctl.h)."""


def module_command(name: str, *words: str) -> list[str]:
    """`-P` keeps the working directory off the module path: a folder named `serving` or `export` must not be run."""
    return [sys.executable, "-P", "-m", name, *words]


def end_with_parent(number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Has the kernel send this process a signal when its parent ends.

    Ends it now if it is not the child of `parent`, which has then ended before.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent not in {None, os.getppid()}:
        sys.exit(os.EX_TEMPFAIL)
