"""Common parts of `bertserve simulate` and `bertserve size`: options, errors and output files."""

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
"""Exit codes: the objective holds or none was given; the objective is missed; no result."""


def parser_of(verb: str, description: str) -> OptionParser:
    return OptionParser(prog=f"bertserve {verb}", description=description, allow_abbrev=False)


def add_shared(made: OptionParser, out: str) -> None:
    """Adds the options of both commands; `out` is the help of --out."""
    made.add_argument("--out", type=Path, metavar="FILE", help=out)
    made.add_argument("--seed", type=int, default=1, help="Seed of arrivals, lengths and jitter (default: 1).")
    made.add_argument("--json", action="store_true", help="Print the results as JSON.")


def exit_code(verb: str, act: Callable[[], bool]) -> int:
    """Maps whether the objective holds to an exit code, and prints errors in one line."""
    try:
        return HOLDS if act() else BROKEN
    except (BenchError, ExportError) as error:
        print(f"bertserve {verb}: {error}", file=sys.stderr)
        return IMPOSSIBLE


def check_suffix(out: Path | None, known: Sequence[str]) -> None:
    """Raises BenchError if the suffix of the output file is not allowed, or a module to draw it is missing."""
    if out is None:
        return
    if out.suffix not in known:
        raise BenchError(f"--out {out}: must end in {' or '.join(known)}")
    if out.suffix != ".json":
        check_installed("jinja2", "matplotlib")


def write(out: Path, content: str) -> None:
    """Writes a file and prints its path; raises BenchError on failure."""
    try:
        out.write_text(content, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--out {out}: {error.strerror}") from error
    print(f"written: {out}", file=sys.stderr)
