"""A measuring process: one line of JSON asks, one line of JSON answers.

Each subject is measured from a process of its own, so that neither its interpreter lock nor its memory
nor its threads are shared with another, and all of them stay alive while their turns alternate.
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

from loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

_ROOT = Path(__file__).parents[2]
_END_S = 5.0


def module_environment() -> dict[str, str]:
    """The environment in which `python -m loadtest.x` finds this very package."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def module_process(module: str, *, text: bool = False) -> subprocess.Popen[Any]:
    """`python -m module`, asked through its standard input and answering on its standard output."""
    command, pipe = [sys.executable, "-m", module], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=text, env=module_environment())


class Child:
    """The asking end. Leaving its `with` block ends the process."""

    def __init__(self, module: str) -> None:
        """Starts `python -m module`, which must call `answer`."""
        self._module = module
        self._process = module_process(module, text=True)

    def ask(self, verb: str, limit_s: float = 60.0, **arguments: object) -> Any:  # noqa: ANN401  whatever JSON holds
        """Asks one thing and waits for the answer.

        Args:
            verb: One of those that the child answers.
            limit_s: How long it may take.
            **arguments: What the verb takes.

        Raises:
            BenchError: The child failed, ended or took too long.
        """
        if self._process.stdin is None or self._process.stdout is None:
            raise BenchError(f"{self._module} was started without pipes")
        try:
            self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise BenchError(f"{self._module} ended by itself") from None
        # One answer a question: nothing can be left in the reader's buffer that `select` would not see.
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            raise BenchError(f"{self._module} did not answer {verb!r} within {limit_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"{self._module} ended by itself")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchError(answer["error"])
        return answer["answer"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            # A question that a dead child never read is flushed once more; the pipe closes all the same.
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def answer(verbs: Mapping[str, Callable[..., object]]) -> None:
    """The answering end: serves until nobody asks any more.

    Args:
        verbs: What can be asked; each takes keyword arguments and returns what JSON can hold.
    """
    # Nothing in a measuring loop makes cycles, so a collection would only add its pauses to the figures.
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
        # Whoever asks tells the user.
        os._exit(1)
