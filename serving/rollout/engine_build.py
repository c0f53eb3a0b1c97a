"""Builds TensorRT engines for this node's GPU while the server serves, in a process of `bertserve build`."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from serving.errors import EngineFailed
from serving.rollout.verb_process import VerbProcess

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("bertserve.build")

_END_S = 5.0
"""Grace period for a terminated build to remove its files."""

_ENDS = "the server is shutting down"
_SAID_FIRST = "bertserve build: "


class EngineBuilder:
    def __init__(self, cache: Path, precision: str = "auto") -> None:
        self._cache, self._precision = cache, precision
        self._turn = threading.Lock()
        self._process: VerbProcess | None = None
        self._end_by: float | None = None

    def build(self, bundle: Path) -> None:
        """Builds and proves a bundle's engine and writes it to the cache; takes minutes.

        Raises:
            EngineFailed: The message says why. `passing` if memory or disk was short or the server ends.
        """
        with self._turn:
            if self._end_by is not None:
                raise EngineFailed(_ENDS, passing=True)
            log.info("building a TensorRT engine of %s", bundle)
            options = [str(bundle), "--cache-dir", str(self._cache)]
            options += [] if self._precision == "auto" else ["--precision", self._precision]
            self._process = process = VerbProcess("build", *options, stderr=subprocess.STDOUT)
            if self._end_by is not None:
                process.terminate()
            last = ""
            for last in process.lines():
                log.info("%s: %s", bundle.parent.name, last)
            status = process.wait()
            self._process = None
        if self._end_by is not None:
            raise EngineFailed(_ENDS, passing=True)
        if status != 0:
            reason = (
                last.removeprefix(_SAID_FIRST) if last.startswith(_SAID_FIRST) else f"the build exited with {status}"
            )
            for path in (bundle.parents[1], self._cache):  # clients see it, without this machine's paths
                reason = reason.replace(f"{os.path.abspath(path)}/", "")  # noqa: PTH100  `resolve` would follow links
            passing = status in {os.EX_TEMPFAIL, -signal.SIGKILL}
            raise EngineFailed(f"cannot build a TensorRT engine: {reason}", passing=passing)

    def stop(self) -> None:
        if self._end_by is None:  # only once: a second signal would interrupt its cleanup
            self._end_by = time.monotonic() + _END_S
            if (process := self._process) is not None:
                process.terminate()

    def close(self) -> None:
        """Stops the build, and waits up to `_END_S` until it has removed its files."""
        self.stop()
        if (process := self._process) is not None and self._end_by is not None:
            process.kill_after(max(0.0, self._end_by - time.monotonic()))
