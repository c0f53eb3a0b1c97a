"""Runs project modules in child processes that end with this process.

Imports almost nothing: an engine process calls `end_with_parent` before any slow work. `python -m
bertserve.serving.engine.children PID MODULE WORDS` does so for a module that cannot.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Option of `prctl`: the signal to send to this process when its parent ends (linux/prctl.h)."""


def module_command(name: str, *words: str) -> list[str]:
    """Returns the command that runs a module.

    `-P` keeps the working directory off the module path, so a folder named `bertserve` is never run.
    """
    return [sys.executable, "-P", "-m", name, *words]


def end_with_parent(number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Asks the kernel to signal this process when its parent ends.

    Exits at once if the process is not a child of `parent`, which has then ended already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent not in {None, os.getppid()}:
        sys.exit(os.EX_TEMPFAIL)


def become(parent: str, name: str, *words: str) -> None:
    """Turns this process, a child of `parent`, into a module that is told to end with it; does not return."""
    end_with_parent(signal.SIGTERM, int(parent))
    os.execv(sys.executable, module_command(name, *words))  # noqa: S606  needs no shell


if __name__ == "__main__":
    become(*sys.argv[1:])
