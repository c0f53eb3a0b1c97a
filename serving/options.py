"""Command-line parsing with one-line errors."""

from __future__ import annotations

import argparse
import difflib
from typing import TYPE_CHECKING, Any, NoReturn

from serving.host import command

if TYPE_CHECKING:
    from collections.abc import Collection


def nearest(word: str, known: Collection[str]) -> str:
    """A suffix for errors about an unknown word: the known word that was probably meant, if any."""
    close = difflib.get_close_matches(word, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def positive(argument: str) -> int:
    """An argument that must be at least 1.

    Raises:
        ArgumentTypeError: It is less than 1.
    """
    number = int(argument)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


class OptionParser(argparse.ArgumentParser):
    """An argparse parser that reports an error in one line, without the list of options."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  argparse's own
        super().__init__(**options, add_help=False)
        self.add_argument("-h", "--help", action="help", help="Show this help and exit.")

    def error(self, message: str) -> NoReturn:
        _, unrecognized, rest = message.partition("unrecognized arguments: ")
        if unrecognized:
            options = [word.partition("=")[0] for word in rest.split() if word.startswith("-")]
            message = f"unexpected argument {rest!r}"
            if options:
                message = f"unknown option {options[0]}{nearest(options[0], self._option_string_actions)}"
        program, verb, *_ = self.prog.split()
        usage = command(verb) if program == "bertserve" else self.prog
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; `{usage} --help` lists the options\n")
