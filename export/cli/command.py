"""Common code of the verbs: arguments, signals, and errors in one line."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bertserve.export.errors import ExportError
from bertserve.export.progress import Progress
from bertserve.serving.errors import BundleError
from bertserve.serving.host import installing
from bertserve.serving.models.bundle import Bundle, open_bundle
from bertserve.serving.models.manifest import MANIFEST
from bertserve.serving.models.node_cache import CacheError
from bertserve.serving.models.verified_dir import versions
from bertserve.serving.options import positive

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterator
    from types import FrameType

_FAILED = 1


class Interrupted(BaseException):
    """A signal asked the command to stop. Like `KeyboardInterrupt`, not an `Exception`."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def run(
    parser: ArgumentParser,
    argv: list[str],
    action: Callable[[Namespace, Progress], int],
    *,
    path: str = "bundle",
    modules: frozenset[str] = frozenset(),
    extras: str = "",
) -> int:
    """Runs a verb and returns its exit code.

    The result of `action`, 1 failed with one line on stderr, 2 not understood, 3 made in part, 75 too little memory or
    disk, 130 or 143 interrupted.

    Args:
        parser: The verb's arguments; its `prog` begins every message.
        argv: The arguments.
        action: The work, with the parsed arguments; it may call `parser.error`.
        path: The argument to name if the system does not say which file it could not read or write.
        modules: Top-level modules that an optional installation brings.
        extras: That installation, as pip takes it.
    """
    try:
        options = parser.parse_args(argv)
        with _interrupts() as check:
            progress = Progress(sys.stdout, check)
            try:
                return action(options, progress)
            finally:
                progress.clear()
    except SystemExit as end:
        return int(end.code or 0)
    except Interrupted as interrupt:
        _print_error(parser, str(interrupt))
        return interrupt.exit_code
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in modules:
            raise
        _print_error(parser, f"the module {error.name} is missing: {installing(extras)}")
    except ExportError as error:
        _print_error(parser, str(error))
        return error.exit_code
    except (BundleError, CacheError) as error:
        _print_error(parser, str(error))
    except OSError as error:
        _print_error(parser, f"{error.filename or getattr(options, path)}: {error.strerror or error}")
    return _FAILED


@contextmanager
def _interrupts() -> Iterator[Callable[[], None]]:
    """Raises `Interrupted` on the main thread on SIGINT and SIGTERM while the block runs.

    An exception raised inside a finalizer or a C callback is lost, so the signal is also remembered: the yielded
    function raises it again.
    """
    received: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        raise Interrupted(number)

    def check() -> None:
        if received:
            raise Interrupted(received[-1])

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def add_bundle(parser: ArgumentParser) -> None:
    """The argument that names the bundle; `open_named` opens it."""
    parser.add_argument(
        "bundle",
        type=Path,
        metavar="BUNDLE",
        help="Bundle: `models/MODEL/VERSION`, or `models/MODEL` for the newest version.",
    )


def add_threads(parser: ArgumentParser) -> None:
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU cores to use (default: all).")


def open_named(path: Path) -> Bundle:
    """Verifies and opens a bundle: that of a version's directory, or the newest of a model's.

    Raises:
        BundleError: There is no bundle, or it does not match its manifest.
    """
    # The directories' names are part of what is checked: `.` has none.
    folder = Path(os.path.abspath(path))  # noqa: PTH100  `resolve` would follow links, which bundles must not be
    if folder.is_dir() and not (folder / MANIFEST).exists() and (numbers := versions(folder)):
        folder /= str(numbers[-1])
    elif models := _models_of(folder):
        raise BundleError(
            f"{path} is a repository of {len(models)} models; use one of them, such as {path / models[0]}. Others:"
            f" {', '.join(models[1:])}"
            if models[1:]
            else f"{path} is a repository; use its model, {path / models[0]}"
        )
    return open_bundle(folder)


def _models_of(folder: Path) -> list[str]:
    """Names of the models in a repository; none for other directories, such as a bundle."""
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return []
    return sorted(each.name for each in folder.iterdir() if each.is_dir() and versions(each))


def _print_error(parser: ArgumentParser, sentence: str) -> None:
    sys.stderr.write(f"{parser.prog}: {' '.join(sentence.split())}\n")
