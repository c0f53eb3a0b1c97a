"""Progress of an export in the terminal: a line per stage, a counter, and no output of libraries."""

from __future__ import annotations

import logging
import math
import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from bertserve.serving.bulk.progress import ProgressLine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Progress(ProgressLine):
    """Writes a line for each stage with its seconds; a terminal shows how far the stage is."""

    def __init__(self, stream: TextIO, check: Callable[[], None]) -> None:
        """Starts the clock.

        Args:
            stream: Where to write.
            check: Called between stages and counts; raises if the export was interrupted.
        """
        super().__init__(stream)
        self._next = math.inf  # never, unless to a terminal: stage lines are enough elsewhere
        self._check = check
        self._started = time.perf_counter()
        self._stage = ""

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Prints the name of the stage in the block, and its duration at the end."""
        self._check()
        self._stage = title
        started = time.perf_counter()
        self.say(title)
        yield
        self._check()
        self._write(f"  {title:<44} {time.perf_counter() - started:6.1f} s")

    def count(self, done: int, total: int) -> None:
        """Shows how far the stage is."""
        self._check()
        self.say(f"{self._stage} {done}/{total}", done / total if total else None)

    def notice(self, sentence: str) -> None:
        """Prints a message that does not stop the export."""
        self._write(f"  note: {sentence}")

    def _write(self, line: str) -> None:
        self.clear()
        self.stream.write(f"{line}\n")
        self.stream.flush()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses warnings and log lines below ERROR.

    Libraries warn while tracing and quantizing about what the checks and the comparison decide for certain.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
