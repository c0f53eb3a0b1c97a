"""Progress of an export in the terminal: a line per stage, a counter, and no output of libraries."""

from __future__ import annotations

import logging
import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_REDRAW_S = 0.1


class Progress:
    """Writes stage lines with elapsed seconds; carriage returns only to a terminal."""

    def __init__(self, stream: TextIO, check: Callable[[], None]) -> None:
        """Starts the clock.

        Args:
            stream: Where to write.
            check: Called between stages and counts; raises if the export was interrupted.
        """
        self._stream = stream
        self._check = check
        self._terminal = stream.isatty()
        self._started = time.perf_counter()
        self._stage = ""
        self._drawn = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Prints the name of the stage in the block, and its duration at the end."""
        self._check()
        self._stage = title
        started = time.perf_counter()
        if self._terminal:
            self._write(f"\r\x1b[K  {title} ...")
        yield
        self._check()
        self._write(f"{self._restart()}  {title:<44} {time.perf_counter() - started:6.1f} s\n")

    def count(self, done: int, total: int) -> None:
        """Shows how far the stage is."""
        self._check()
        now = time.perf_counter()
        if self._terminal and now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._write(f"\r\x1b[K  {self._stage} {done}/{total}")

    def notice(self, sentence: str) -> None:
        """Prints a message that does not stop the export."""
        self._write(f"{self._restart()}  note: {sentence}\n")

    def clear(self) -> None:
        """Ends an unfinished line, before something else is written."""
        self._write(self._restart())

    def _restart(self) -> str:
        return "\r\x1b[K" if self._terminal else ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


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
