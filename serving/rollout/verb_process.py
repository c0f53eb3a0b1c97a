"""`bertserve export` as a process that ends with the server and logs as it does.

`python -m serving.rollout.verb_process PID VERB ARGUMENTS` becomes one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from serving.children import end_with_parent, module_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class VerbProcess:
    """A running verb in a session of its own, which a terminal's Ctrl-C does not reach.

    Processes that it starts, such as TensorRT's builder, belong to that session too.
    """

    def __init__(
        self,
        *words: str,
        environment: Mapping[str, str] | None = None,
        stdout: int | None = subprocess.PIPE,
    ) -> None:
        self._process = subprocess.Popen(
            module_command(__name__, str(os.getpid()), *words),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )

    def lines(self) -> Iterator[str]:
        """The lines that it writes until it ends, if it writes to a pipe."""
        for line in self._process.stdout or ():
            if line.strip():
                yield " ".join(line.split())

    def wait(self) -> int:
        """Waits for its end; returns its exit status, negative for a signal."""
        # Not in a `with` block: leaving that on an exception, such as an interrupt, would wait for the end, too.
        status = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return status

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def terminate(self) -> None:
        """Asks it to end and to remove its files."""
        self._signal(signal.SIGTERM)

    def kill_after(self, limit_s: float) -> None:
        """Waits for its end, at most so long, and then kills what is left of its session."""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(limit_s)
        finally:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # Also if its first process was killed: processes that it started keep the pipe open, and the reader waits.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def become(parent: str, verb: str, *arguments: str) -> None:
    """Turns this process, a child of `parent`, into a verb of bertserve; does not return."""
    end_with_parent(signal.SIGTERM, int(parent))
    os.execv(sys.executable, module_command("bertserve", verb, *arguments))  # noqa: S606  needs no shell


if __name__ == "__main__":
    become(*sys.argv[1:])
