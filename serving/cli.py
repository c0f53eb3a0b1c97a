"""The command `bertserve serve`.

Cheap checks come first: settings, bundles, GPUs, ports. The protocol and engine libraries are imported only afterwards,
so that a wrong setting is reported within a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from bertserve.serving.errors import StartupError, escape
from bertserve.serving.lifecycle import collect_rarely

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from bertserve.serving.logs import LogWriter

BEFORE_IMPORTS = {
    "TOKENIZERS_PARALLELISM": "false",  # the tokenizers' thread pool would compete with the engine for its cores
    "PYDANTIC_DISABLE_PLUGINS": "__all__",  # pydantic would search every installed package for plugins
}
"""Variables that these libraries read once, on import."""

_INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """Serves until a signal; returns 0, or another code after one line on standard error."""
    os.environ.update(BEFORE_IMPORTS)
    collect_rarely()
    # PID 1 of a container has no default handler for SIGTERM, and shells start background commands with SIGINT ignored.
    signals = _EarlySignals()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signals.note)
    started: list[LogWriter] = []
    try:
        return _serve(argv, started, signals)
    except StartupError as error:
        _say_end(str(error), started, as_json=error.as_json)
        return error.exit_code
    except _EndedWhileStarting as end:
        if end.number == signal.SIGTERM:
            return 0
        _say_end("interrupted", started)
        return _INTERRUPTED
    finally:
        for log in started:
            log.flush()


def _say_end(why: str, started: list[LogWriter], *, as_json: bool = False) -> None:
    """Prints the reason of the end in one line on standard error, in JSON if the log is in JSON."""
    from bertserve.serving.logs import line  # noqa: PLC0415  the start imports it behind the signals

    for log in started:
        log.flush()
    why = " ".join(why.split())
    text = f"bertserve serve: {escape(why)}\n"
    if as_json or any(log.form == "json" for log in started):
        head = {"name": "bertserve", "levelno": logging.ERROR, "levelname": "ERROR", "msg": why}
        text = line(logging.makeLogRecord(head), "json").decode()
    with contextlib.suppress(OSError):  # standard error is closed; the exit code still tells
        print(text, end="", file=sys.stderr, flush=True)


class _EndedWhileStarting(BaseException):
    """A signal to end arrived before the server listened to signals."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _EarlySignals:
    """Records signals that arrive before the server listens to them.

    They end the start between its steps. An exception raised at an arbitrary point could be swallowed or replaced by
    the interrupted code.
    """

    def __init__(self) -> None:
        self.noted: list[int] = []
        self._waits = False

    def note(self, number: int, _: FrameType | None) -> None:
        self.noted.append(number)
        if self._waits:
            raise _EndedWhileStarting(number)

    def check(self) -> None:
        if self.noted:
            raise _EndedWhileStarting(self.noted[0])

    @contextlib.contextmanager
    def ending_a_wait(self) -> Iterator[None]:
        """Lets a signal interrupt the enclosed code, which waits for another process."""
        self._waits = True
        try:
            self.check()
            yield
        finally:
            self._waits = False


def _serve(argv: list[str], started: list[LogWriter], signals: _EarlySignals) -> int:
    from bertserve.serving.settings import Settings  # noqa: PLC0415  in the order of the checks

    settings = Settings.load(argv)
    from bertserve.serving import logs  # noqa: PLC0415

    log = logs.start(settings.log_format, settings.log_level)
    started.append(log)
    from bertserve.serving.net.ports import Ports, raise_descriptor_limit  # noqa: PLC0415

    if settings.model_id:
        from bertserve.serving.rollout.model_export import export_model  # noqa: PLC0415

        Ports.open(settings).close()  # fails now if a port is taken, because the export takes minutes
        with signals.ending_a_wait():
            settings = export_model(settings, os.environ)
    signals.check()
    from bertserve.serving.rollout.engine_choice import Chooser  # noqa: PLC0415

    chooser = Chooser(settings)
    choice = chooser.first()
    raise_descriptor_limit()
    ports = Ports.open(settings)
    choice.log()  # after the checks: a failed start prints only its error
    from bertserve.serving.server import run  # noqa: PLC0415

    signals.check()
    return run(settings, choice, chooser, ports, log, signals.noted)
