"""What every verb of the exporter shares: what they read, signals, and failures as one line."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from typing import TYPE_CHECKING

from export.cli.interrupts import Interrupted, Interrupts
from export.errors import ExportError
from export.progress import Progress
from serving.errors import BundleError
from serving.models.node_cache import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_FAILED = 1


def run(verb: str, action: Callable[[Progress], int], *, path: Path, modules: frozenset[str], extras: str) -> int:
    """Runs a verb and returns its exit code: what `action` says, 1 failed, 75 for want of room, 130 or 143 interrupted.

    Args:
        verb: Its name.
        action: The work; it is told where to show its progress.
        path: What to name when the system says that a file cannot be read or written, and not which.
        modules: Top-level modules that an optional installation brings.
        extras: Which one, as pip takes it.
    """
    try:
        with Interrupts() as interrupts:
            progress = Progress(sys.stdout, interrupts.check)
            try:
                return action(progress)
            finally:
                progress.clear()
    except Interrupted as signal:
        _say(verb, str(signal))
        return signal.exit_code
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in modules:
            raise
        _say(verb, f"the module {error.name} is missing: pip install bertserve[{extras}]")
    except ExportError as error:
        _say(verb, str(error))
        return error.exit_code
    except (BundleError, CacheError) as error:
        _say(verb, str(error))
    except OSError as error:
        _say(verb, f"{error.filename or path}: {error.strerror or error}")
    return _FAILED


def positive(word: str) -> int:
    """A number on a command line that counts something.

    Raises:
        ArgumentTypeError: It is less than 1.
    """
    number = int(word)
    if number < 1:
        raise ArgumentTypeError("must be 1 or more")
    return number


def _say(verb: str, sentence: str) -> None:
    sys.stderr.write(f"bertserve {verb}: {' '.join(sentence.split())}\n")
