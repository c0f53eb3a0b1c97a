"""The log: a bounded queue, and one thread that writes it.

Neither the event loop nor an engine's lane waits for the reader of the log. If the pipe is not read or closed, or the
disk is full, lines are lost and counted. A message that repeats is shown a few times and then once a second, with the
number of hidden ones. The standard library's QueueHandler formats in the caller's thread; its QueueListener writes for
every line and counts no lost ones.

No user text gets into a line: messages are templates with names and numbers. Of other libraries' exceptions only type
and place are shown, because their messages may repeat input. What may still come from outside, such as the name of a
field or a file, is `escape`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

import orjson

from bertserve.serving.errors import BertserveError, StartupError, escape

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

Format = Literal["text", "json"]

MAX_LINES = 10_000
"""Maximum lines that wait to be written; further ones are lost."""

_PAUSE_S = 0.01
"""Pause between two writes, so that fast lines are written together without waking the thread for each."""

_BURST = 20
_PER_S = 1.0
_MAX_KEYS = 1000

_NOWHERE, _STDOUT, _STDERR = -1, 1, 2

_SAFE = (BertserveError, StartupError, OSError)
"""Exceptions whose messages contain no client input."""


def fields(**values: object) -> dict[str, Any]:
    """For a logging call's `extra`: values that a line shows behind its message, or as JSON members."""
    return {"fields": values}


def members(**values: object) -> dict[str, Any]:
    """For `extra` too: what the message says in words, for programs; a line of text does not repeat it."""
    return {"members": values}


def log_fields(say: Callable[..., None], message: str, /, **values: object) -> None:
    """Logs, by a method of a logger, a message whose arguments are these `members`, in this order."""
    say(message, *values.values(), extra=members(**values))


class RateLimit:
    """Lets a few messages of a kind through at once, and then one a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[Hashable, list[float]] = {}

    def admit(self, kind: Hashable) -> int | None:
        """Number of hidden messages of this kind since the last one shown; None if this one is hidden too."""
        now = self._clock()
        state = self._kinds.get(kind)
        if state is None:
            if len(self._kinds) >= _MAX_KEYS:
                self._kinds.clear()
            state = self._kinds[kind] = [float(_BURST), now, 0]
        left, since, hidden = state
        left = min(float(_BURST), left + (now - since) * _PER_S)
        if left < 1:
            state[:] = left, now, hidden + 1
            return None
        state[:] = left - 1, now, 0
        return int(hidden)


class LogWriter(logging.Handler):
    """Queues lines and writes them from a thread of its own; at most `most_lines` wait.

    Attributes:
        lost: Number of lines that could not be written or queued.
        limit: Limits repeated messages.
    """

    def __init__(self, form: Format, *, descriptor: int = _STDERR, most_lines: int = MAX_LINES) -> None:
        super().__init__()
        self.lost = 0
        self.limit = RateLimit()
        self.form = form
        self._descriptor = descriptor
        self._most_lines = most_lines
        self._queue: SimpleQueue[logging.LogRecord | bytes | threading.Event] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a line, unless too many of its kind came before it."""
        if not hasattr(record, "limited"):
            hidden = self.limit.admit((record.name, record.msg))
            if hidden is None:
                return
            record.hidden = hidden
        self._put(record)

    def say(self, text: str) -> None:
        """Queues a text for people, for standard output."""
        self._put(text.encode())

    def flush(self, limit_s: float = 1.0) -> None:
        """Waits until the queue is written, at most for the limit."""
        written = threading.Event()
        self._queue.put(written)
        written.wait(limit_s)

    def _put(self, item: logging.LogRecord | bytes) -> None:
        if self._queue.qsize() >= self._most_lines:
            self.lost += 1
        else:
            self._queue.put(item)

    def _run(self) -> None:
        while True:
            items = [self._queue.get()]
            items += [self._queue.get() for _ in range(self._queue.qsize())]
            lines: list[bytes] = []
            for item in items:
                if isinstance(item, logging.LogRecord):
                    lines += self._lines(item)
                    continue
                self._write(self._descriptor, lines)
                lines = []
                if isinstance(item, bytes):
                    # As below: a missing descriptor may belong to something else by now.
                    self._write(_STDOUT if sys.stdout is not None else _NOWHERE, [item])
                else:
                    item.set()
            self._write(self._descriptor, lines)
            time.sleep(_PAUSE_S)

    def _lines(self, record: logging.LogRecord) -> list[bytes]:
        try:
            return [line(record, self.form)]
        except (TypeError, ValueError):  # a message that does not fit its arguments
            self.lost += 1
            return []

    def _write(self, descriptor: int, lines: list[bytes]) -> None:
        rest = memoryview(b"".join(lines))
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:  # closed, full, or not to be waited for
            self.lost += max(1, bytes(rest).count(b"\n"))


def start(form: Format, level: str) -> LogWriter:
    """Sends the log of this process to standard error; returns its writer."""
    # A process that was started without standard error may have opened something else under its number.
    writer = LogWriter(form, descriptor=_STDERR if sys.stderr is not None else _NOWHERE)
    logging.root.handlers = [writer]
    logging.root.setLevel(level.upper())
    logging.captureWarnings(True)
    return writer


def line(record: logging.LogRecord, form: Format) -> bytes:
    """A record as one line: JSON with all of it, or text with the traceback below it."""
    extra: Mapping[str, object] = getattr(record, "fields", {})
    if hidden := getattr(record, "hidden", 0):
        extra = {**extra, "hidden": hidden}
    when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    trace = "\n".join(_traceback(record.exc_info[1])) if record.exc_info and record.exc_info[1] else ""
    if form == "json":
        head = {"time": when, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        whole = {**head, **extra, **getattr(record, "members", {}), **({"exception": trace} if trace else {})}
        try:
            written = orjson.dumps(whole, default=str).decode()
        except TypeError:  # half of a surrogate pair, as in the name of a file that is not UTF-8
            written = json.dumps(whole, default=str)
        return f"{escape(written)}\n".encode()
    words = "".join(f" {name}={value}" for name, value in extra.items() if value is not None)
    text = escape(f"{when} {record.levelname} {record.name}: {record.getMessage()}{words}") + "\n"
    return (f"{text}{trace}\n" if trace else text).encode("utf-8", "backslashreplace")


def _traceback(error: BaseException) -> Iterator[str]:
    """An exception and its causes, the first one first: place in the code, type, and messages that are safe."""
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if behind is not None:
        yield from _traceback(behind)
        yield "which led to"
    yield "".join(traceback.format_tb(error.__traceback__)).rstrip("\n")
    kind = type(error)
    yield f"{kind.__module__}.{kind.__qualname__}" + (escape(f": {error}") if isinstance(error, _SAFE) else "")
