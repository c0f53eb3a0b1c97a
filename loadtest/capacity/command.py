"""What `bertserve simulate` and `bertserve size` have in common: options, refusals, and how a file is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from export.errors import ExportError
from loadtest.errors import BenchError, check_installed
from serving.options import OptionParser

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HOLDS, BROKEN, IMPOSSIBLE = 0, 1, 2
"""Exit codes: an objective is held, or there is none; it is not; nothing could be said."""


def parser_of(verb: str, description: str) -> OptionParser:
    return OptionParser(prog=f"bertserve {verb}", description=description, allow_abbrev=False)


def add_shared(made: OptionParser, out: str) -> None:
    """Adds the options of both verbs; `out` says what --out writes."""
    made.add_argument("--out", type=Path, metavar="FILE", help=out)
    made.add_argument("--seed", type=int, default=1, help="Seed of arrivals, lengths and jitter (default: 1).")
    made.add_argument("--json", action="store_true", help="Print the results as JSON.")


def exit_code(verb: str, act: Callable[[], bool]) -> int:
    """Whether what is asked for is held, as an exit code; what makes no sense is said in one line."""
    try:
        return HOLDS if act() else BROKEN
    except (BenchError, ExportError) as error:
        print(f"bertserve {verb}: {error}", file=sys.stderr)
        return IMPOSSIBLE


def check_suffix(out: Path | None, known: Sequence[str]) -> None:
    """Raises BenchError where the name of a file to be written ends otherwise, or what draws it is not installed."""
    if out is None:
        return
    if out.suffix not in known:
        raise BenchError(f"--out {out}: must end in {' or '.join(known)}")
    if out.suffix != ".json":
        check_installed("jinja2", "matplotlib")


def write(out: Path, content: str) -> None:
    """Writes a file, and says so; raises BenchError where it cannot be written."""
    try:
        out.write_text(content, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--out {out}: {error.strerror}") from error
    print(f"written: {out}", file=sys.stderr)
