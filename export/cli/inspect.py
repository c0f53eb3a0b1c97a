"""`bertserve inspect`: shows a bundle, for a terminal or a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bertserve.export.cli.command import add_bundle, open_named, run
from bertserve.export.pages.tables import show
from bertserve.export.report import terminal
from bertserve.serving.models.manifest import MANIFEST
from bertserve.serving.options import OptionParser

if TYPE_CHECKING:
    import argparse

    from bertserve.export.progress import Progress


def main(argv: list[str]) -> int:
    """Prints a bundle; exit codes as in `command.run`."""
    return run(parser(), argv, _inspect)


def _inspect(options: argparse.Namespace, _progress: Progress) -> int:
    bundle = open_named(options.bundle)
    if options.json:
        print((bundle.path / MANIFEST).read_text(encoding="utf-8").strip())
    else:
        show(*terminal.whole(bundle))
    return 0


def parser() -> argparse.ArgumentParser:
    arguments = OptionParser(
        prog="bertserve inspect",
        description="Show what a bundle contains and how each artifact was verified. Checks the bundle's files first.",
    )
    add_bundle(arguments)
    arguments.add_argument("--json", action="store_true", help="Print the manifest as JSON.")
    return arguments
