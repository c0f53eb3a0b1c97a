"""Command lines: what is wrong with one is told in one line."""

from __future__ import annotations

import argparse
import difflib
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Collection


def nearest(word: str, known: Collection[str]) -> str:
    """For the end of an error about an unknown word: the known one that was probably meant, if there is one."""
    close = difflib.get_close_matches(word, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""


class OptionParser(argparse.ArgumentParser):
    """argparse's, which answers a wrong command line with one line in place of all options."""

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201  argparse's
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            words = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            self.error(
                f"unknown option {words[0]}{nearest(words[0], self._option_string_actions)}"
                if words
                else f"unexpected argument {unknown[0]!r}"
            )
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; `{self.prog} --help` lists the options\n")
