"""Progress of a command: one line, updated in place on a terminal, printed at intervals elsewhere."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from types import TracebackType


class ProgressLine:
    """A progress line for a `with` block, which clears it at the end. Updates in place need rich."""

    _every_s = 10.0
    """Seconds between printed lines."""

    def __init__(self, stream: TextIO) -> None:
        """Prepares a line on `stream`, without output."""
        self.stream = stream
        self._changes = stream.isatty() and find_spec("rich") is not None
        self._live: Any = None
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def say(self, words: str, share: float | None = None) -> None:
        """Shows a message; on a terminal with a bar, filled if `share` of the work (0 to 1) is known."""
        if self._changes:
            if self._live is None:
                self._live = _live(self.stream, words)
            task = self._live.task_ids[0]
            self._live.update(task, description=words, total=None if share is None else 1.0, completed=share or 0.0)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            self.stream.write(f"{words}\n")
            self.stream.flush()

    def clear(self) -> None:
        """Clears the line from the terminal, before other output."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _live(stream: TextIO, words: str) -> Any:  # noqa: ANN401  the type of an optional library
    from rich.console import Console  # noqa: PLC0415  optional: an extra installs it
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    live = Progress(
        *columns, console=Console(file=stream), transient=True, redirect_stdout=False, redirect_stderr=False
    )
    live.add_task(words, total=None)
    live.start()
    return live
