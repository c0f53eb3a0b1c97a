"""A measuring process that answers one line of JSON with one line of JSON.

Each subject is measured from its own process. No interpreter lock, memory or threads are shared, and all processes stay
alive while their turns alternate.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bertserve.loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

_ROOT = Path(__file__).parents[3]
_END_S = 5.0


def module_environment() -> dict[str, str]:
    """An environment in which `python -m bertserve.loadtest.x` finds this package."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def module_process(module: str, *, text: bool = False) -> subprocess.Popen[Any]:
    """Starts `python -m module` with pipes on standard input and output."""
    command, pipe = [sys.executable, "-m", module], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=text, env=module_environment())


class Child:
    """The calling side. Leaving its `with` block ends the process."""

    def __init__(self, module: str) -> None:
        """Starts `python -m module`, which must call `answer`."""
        self._module = module
        self._process = module_process(module, text=True)

    def ask(self, verb: str, limit_s: float = 60.0, **arguments: object) -> Any:  # noqa: ANN401  any JSON value
        """Sends one question and waits for the answer.

        Args:
            verb: One of the child's verbs.
            limit_s: Timeout in seconds.
            **arguments: Arguments of the verb.

        Raises:
            BenchError: The child failed, ended or timed out.
        """
        if self._process.stdin is None or self._process.stdout is None:
            raise BenchError(f"{self._module} was started without pipes")
        try:
            self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise BenchError(f"{self._module} exited unexpectedly") from None
        # There is one answer per question, so the reader's buffer never holds data that `select` would not see.
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            raise BenchError(f"{self._module} did not answer {verb!r} within {limit_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"{self._module} exited unexpectedly")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchError(answer["error"])
        return answer["answer"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            # Closing flushes a question that a dead child never read; the pipe closes all the same.
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def answer(verbs: Mapping[str, Callable[..., object]]) -> None:
    """The answering side: serves until standard input ends.

    Args:
        verbs: Functions by name; each takes keyword arguments and returns a JSON value.
    """
    # A measuring loop creates no reference cycles, so garbage collection would only add pauses to the figures.
    gc.disable()
    try:
        for line in sys.stdin:
            arguments = json.loads(line)
            try:
                answered = {"answer": verbs[arguments.pop("verb")](**arguments)}
            except BenchError as error:
                answered = {"error": str(error)}
            print(json.dumps(answered), flush=True)
            gc.collect()
    except (KeyboardInterrupt, BrokenPipeError):
        # The calling side reports the error to the user.
        os._exit(1)
