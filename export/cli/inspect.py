"""`bertserve inspect`: what a bundle is, for a terminal or for a program."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from export.cli.bundles import open_at
from export.cli.command import run
from export.report import terminal
from serving.models.manifest import MANIFEST

if TYPE_CHECKING:
    from serving.models.bundle import Bundle


def main(argv: list[str]) -> int:
    """Prints a bundle: 0 done, 1 it is not what its manifest says, 2 not understood."""
    try:
        given = _parser().parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    return run(
        "inspect",
        lambda _progress: _inspect(open_at(given.bundle), as_json=given.json),
        path=given.bundle,
        modules=frozenset(),
        extras="",
    )


def _inspect(bundle: Bundle, *, as_json: bool) -> int:
    print((bundle.path / MANIFEST).read_text(encoding="utf-8").strip() if as_json else terminal.whole(bundle))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bertserve inspect",
        description="Checks a bundle's files and prints what they are and how far each artifact was proven.",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="models/MODEL/VERSION, or models/MODEL's newest")
    parser.add_argument("--json", action="store_true", help="print the manifest")
    return parser
