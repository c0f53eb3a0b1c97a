"""Builds TensorRT engines for this node's GPU while the server serves, by `bertserve build` in a process of its own.

The process has idle priority and ends with the server: `python -m serving.rollout.engine_build PID ARGUMENTS` becomes
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from serving.errors import EngineFailed
from serving.rollout.engine_process import PR_SET_PDEATHSIG

log = logging.getLogger("bertserve.build")

_END_S = 5.0
"""For a build that is ended to remove what it has written."""

_LEAST_NICE = 19
_FIRST_TO_KILL = "1000"
"""If memory runs out, the build is killed, not the server (`oom_score_adj` of proc(5))."""

_ENDS = "the server ends before the engine is built"
_SAID_FIRST = "bertserve build: "


class EngineBuilder:
    def __init__(self, cache: Path, precision: str = "auto") -> None:
        self._cache, self._precision = cache, precision
        self._turn = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end_by: float | None = None

    def build(self, bundle: Path) -> None:
        """Builds and proves a bundle's engine and writes it to the cache; takes minutes.

        Raises:
            EngineFailed: The message says why. `passing` where memory or disk was short or the server ends.
        """
        with self._turn:
            if self._end_by is not None:
                raise EngineFailed(_ENDS, passing=True)
            log.info("building a TensorRT engine of %s", bundle)
            # `-P` keeps the working directory off the module path: a folder named `serving` must not be run.
            options = [str(bundle), "--cache-dir", str(self._cache)]
            options += [] if self._precision == "auto" else ["--precision", self._precision]
            command = [sys.executable, "-P", "-m", "serving.rollout.engine_build", str(os.getpid()), *options]
            with subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                # So that TensorRT's own process ends with it.
                start_new_session=True,
            ) as process:
                self._process = process
                if self._end_by is not None:
                    self._signal(signal.SIGTERM)
                last = ""
                for line in process.stdout or ():
                    if line.strip():
                        last = " ".join(line.split())
                        log.info("%s: %s", bundle.parent.name, last)
                status = process.wait()
            self._process = None
        if self._end_by is not None:
            raise EngineFailed(_ENDS, passing=True)
        if status != 0:
            reason = (
                last.removeprefix(_SAID_FIRST) if last.startswith(_SAID_FIRST) else f"it ended with status {status}"
            )
            for path in (bundle.parents[1], self._cache):  # clients are shown it, without paths of this machine
                reason = reason.replace(f"{os.path.abspath(path)}/", "")  # noqa: PTH100  `resolve` would follow links
            passing = status in {os.EX_TEMPFAIL, -signal.SIGKILL}
            raise EngineFailed(f"no TensorRT engine could be built: {reason}", passing=passing)

    def stop(self) -> None:
        if self._end_by is None:  # once: a second signal would interrupt its clearing up
            self._end_by = time.monotonic() + _END_S
            self._signal(signal.SIGTERM)

    def close(self) -> None:
        """Stops, and waits up to `_END_S` until the build has removed what it wrote."""
        self.stop()
        if (process := self._process) is not None and self._end_by is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, self._end_by - time.monotonic()))
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # Also where the first of them has been killed: what it had started holds the pipe, and so the thread.
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def end_with(parent: str) -> None:
    """Lets this process end with the one of this id; ends it now where that has ended before it could ask for that."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit(os.EX_TEMPFAIL)


def become(parent: str, *arguments: str) -> None:
    """Turns this process, a child of `parent`, into `bertserve build`; does not return."""
    end_with(parent)
    os.nice(_LEAST_NICE)
    with contextlib.suppress(OSError):  # not every sandbox has the file
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_KILL, encoding="ascii")
    with contextlib.suppress(OSError):  # some sandboxes forbid it; the least niceness is there already
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.execv(sys.executable, [sys.executable, "-P", "-m", "bertserve", "build", *arguments])  # noqa: S606  wants no shell


if __name__ == "__main__":
    become(*sys.argv[1:])
